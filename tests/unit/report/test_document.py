"""One document, three renderers: what a row of the answer says is said alike everywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from autods.report.answers.fit import LADDER, make_comparison, make_fit_document
from autods.report.document import Bullets, Column, Document, Medium, Pairs, Paragraph, line, make_document, tabulate
from autods.report.render_html import to_page
from autods.report.render_markdown import to_markdown
from tests.support.pages import check_page
from tests.support.reports import WINNING, fit, fitting_report, oom, record
from tests.support.terminal import printed


def render(document: Document, width: int = 200) -> Iterator[str]:
    yield " ".join(printed(document, width).split())
    yield to_markdown(document)
    yield check_page(to_page(document)).words


def test_a_made_up_column_of_the_ladder_is_shown_everywhere() -> None:
    spread = Column(name="spread", read=lambda row: line(("made up for ", "dim"), row.rung), right=True)
    for text in render(make_fit_document(fitting_report(), columns=(*LADDER, spread))):
        assert "spread" in text
        assert "made up for zero3" in text


def test_every_renderer_has_the_winners_rate_of_the_answer() -> None:
    trials = (record(1, "zero2", oom()), record(2, "zero3", fit(393.4, 55.5), knobs=WINNING))
    report = replace(fitting_report(), trials=trials, reasons={"zero3": "measured again in turn"})
    for text in (*render(make_fit_document(report)), to_markdown(make_comparison([report]))):
        ladder = text[text.index("peak / limit") :]
        row = ladder[ladder.index("zero3") : ladder.index("measured again")]
        assert "41.7" in row
        assert "55.5" not in row


def test_a_column_that_is_empty_in_each_row_is_left_out() -> None:
    columns = (Column(name="a", read=str), Column(name="b", read=lambda value: "–"), Column(name="c", read=str))
    assert [column.name for column in tabulate(columns, (1, 2)).columns] == ["a", "c"]


def test_brackets_in_the_name_of_a_column_are_no_markup() -> None:
    document = Document(title="", question="", parts=(tabulate((Column(name="x[/b]", read=str),), (1, 2)),))
    assert "x[/b]" in printed(document, 60)


def test_what_leaves_a_narrow_terminal_stands_below_or_is_named() -> None:
    columns = (
        Column(name="rung", read=lambda value: f"zero{value}"),
        Column(name="size", read=lambda value: "123456789", spare=1),
        Column(
            name="why", read=lambda value: f"reason {value} of many", wraps=True, least_width=20, spare=2, below=True
        ),
    )
    document = Document(title="", question="", parts=(tabulate(columns, (1, 2), also_in="x.csv"),))
    wide, middle, narrow = (printed(document, width) for width in (60, 24, 12))
    assert wide.count("zero1") == 1
    assert "reason 1 of many" in wide
    assert "zero1  123456789" in middle
    assert "zero1  reason 1 of" in middle
    assert "123456789" not in narrow
    assert "size: on a wider terminal, and in x.csv" in narrow


@pytest.mark.parametrize("width", [24, 32, 40, 48, 60])
def test_a_table_on_a_narrow_terminal_loses_no_digit(width: int) -> None:
    text = printed(make_fit_document(fitting_report()), width)
    assert "41.7" in text[text.index("✓ fits") : text.index("skipped")]


def test_a_part_is_shown_where_it_belongs() -> None:
    page = check_page(to_page(make_fit_document(fitting_report()))).words
    assert "Every trial" in page
    assert "-v shows" not in page
    assert "Every trial" not in printed(make_fit_document(fitting_report()), 100)
    assert "Every trial" not in to_markdown(make_fit_document(fitting_report()))
    assert Medium.VERBOSE in Medium.TERMINAL


@pytest.mark.parametrize("width", range(24, 60))
def test_no_number_is_parted_from_its_unit(width: int) -> None:
    sentence = "needs 677.0 MiB of 416.0 MiB, 4.05 samples/s in 3 (2.5 to 3.5) min, a headroom of 5 %"
    parts = (Paragraph(words=sentence), Pairs(items=(("why", sentence),)), Bullets(items=(sentence,)))
    text = printed(make_document(title="", question="", parts=parts), width)
    assert " ".join(text.split()).count("677.0 MiB") == 3
    for row in text.splitlines():
        assert not re.match(r"\W*(MiB|samples/s|min|s|%)\b", row)


def test_a_page_holds_a_number_and_its_unit_together() -> None:
    page = to_page(make_document(title="", question="", parts=(Paragraph(words="needs 677.0 MiB in 3 min"),)))
    assert "needs 677.0\N{NO-BREAK SPACE}MiB in 3\N{NO-BREAK SPACE}min" in page


def test_no_line_in_a_pipe_ends_with_spaces() -> None:
    lines = printed(make_fit_document(fitting_report()), 60).split("\n")
    assert max(map(len, lines)) > 50  # some are as wide as they may be
    assert not [text for text in lines if text != text.rstrip()]


@pytest.mark.parametrize("width", range(24, 60, 5))
def test_lines_after_the_first_begin_below_the_words(width: int) -> None:
    sentence = "needs 677.0 MiB (639.6 to 730.7) of 416.0 MiB, 4.05 samples/s in 3 min 24 s"
    for part in (Bullets(items=(sentence,)), Paragraph(words=f"✓ {sentence}", indent=2, hang=2)):
        rows = printed(make_document(title="", question="", parts=(part,)), width).splitlines()
        assert re.match(r"  [·✓] needs", rows[0])
        assert len(rows) > 1
        assert all(re.match(r" {4}\S", row) for row in rows[1:])
        assert " ".join(" ".join(rows).split())[2:] == sentence
