"""Markdown shows what users wrote, and reads none of it as its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autods.report.answers.fit import make_comparison
from autods.report.render_markdown import escape, to_markdown
from tests.support.reports import fitting_report, hopeless_report


def test_markdown_escapes_what_users_wrote() -> None:
    report = replace(fitting_report(), out="a|b<script>")
    text = to_markdown(make_comparison([report, hopeless_report()]))
    assert "<script>" not in text
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert [len({line.count("|") - line.count("\\|") for line in lines}) for lines in tables] == [1, 1, 1]
    assert "nothing fits" in text


@pytest.mark.parametrize(
    ("name", "escaped"),
    [
        ("__init__", r"\_\_init\_\_"),
        ("micro_batch", "micro_batch"),
        ("*[x](y)*", r"\*\[x\](y)\*"),
        ("a\\|b", r"a\\\|b"),
        ("~~gone~~ & <b>", r"\~\~gone\~\~ &amp; &lt;b&gt;"),
        ("\x1b[31mred\nü", r"\\x1b\[31mred ü"),
    ],
)
def test_what_markdown_would_read_as_its_own_is_escaped(name: str, escaped: str) -> None:
    assert escape(name) == escaped
