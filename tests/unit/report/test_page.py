"""The page of a report is one file that makes no request, escapes what users wrote, and stays small."""

from __future__ import annotations

import html.parser
import re
from dataclasses import replace
from pathlib import Path

import pytest

from autods.report import Report
from autods.report.markdown import to_markdown
from autods.report.page import PAGE, render_page, write_page
from autods.report.results import Certificate
from autods.types import Failed
from tests.support.reports import failed, fitting_report, hopeless_report, record

HOSTILE = "<script>alert(1)</script> & \"quotes\" 'single' \x1b[31mred\x00"


class Parsed(html.parser.HTMLParser):
    """The tags and the text of a page."""

    _VOID = ("meta",)

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self._VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("report", [fitting_report(), hopeless_report()], ids=["fit", "nothing fits"])
def test_every_tag_is_closed_and_nothing_is_requested(report: Report) -> None:
    parsed = Parsed(render_page(report))
    assert parsed.open == []
    for tag, attributes in parsed.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "href", "onload", "onclick"} & attributes.keys()
    assert "http" not in re.sub(r"http-equiv", "", render_page(report))


def test_the_page_has_answer_ladder_and_every_trial() -> None:
    parsed = Parsed(render_page(fitting_report()))
    text = " ".join(parsed.text.split())
    assert "zero3 fits, the first rung of the ladder that does" in text
    assert "deepspeed --num_accelerators 2 train.py" in text
    for rung in ("ddp", "zero1", "zero2", "zero2-offload", "zero3", "zero3-nvme"):
        assert rung in text
    assert sum(tag == "details" for tag, _ in parsed.tags) == len(fitting_report().trials) + 1


def test_what_users_wrote_is_escaped(tmp_path: Path) -> None:
    outcome = replace(failed(), evidence=HOSTILE, advice=HOSTILE)
    report = replace(fitting_report(), trials=(record(1, "ddp", outcome),), reasons={"ddp": HOSTILE, HOSTILE: "x"})
    log = tmp_path / "logs" / "001-ddp" / f"rank{max(0, outcome.rank)}.log"
    log.parent.mkdir(parents=True)
    log.write_text(HOSTILE * 100_000)
    page = render_page(report, tmp_path)
    assert page.count("<script>") == 1
    assert "alert(1)" in Parsed(page).text
    assert not set("\x1b\x00") & set(page)
    assert len(page) < 200_000
    assert isinstance(outcome, Failed)


def test_a_page_that_is_written_replaces_the_former(tmp_path: Path) -> None:
    (tmp_path / PAGE).write_text("old")
    assert write_page(fitting_report(), tmp_path) == tmp_path / PAGE
    assert (tmp_path / PAGE).read_text().startswith("<!doctype html>")


def test_a_failed_certificate_is_shown() -> None:
    certificate = Certificate(passed=False, failures=("another loss",))
    text = Parsed(render_page(replace(fitting_report(), certificate=certificate))).text
    assert "Certificate: not passed" in text
    assert "another loss" in text


def test_markdown_escapes_what_users_wrote() -> None:
    report = replace(fitting_report(), out="a|b<script>")
    text = to_markdown([report, hopeless_report()])
    assert "<script>" not in text
    assert all(line.count("|") - line.count("\\|") in (4, 5) for line in text.splitlines() if line.startswith("|"))
    assert "nothing fits" in text
