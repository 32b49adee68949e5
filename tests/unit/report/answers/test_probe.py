"""The page of a probe: whole, escaped, and the same again from the files of the probe."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autods.errors import InputError
from autods.report.answers.probe import describe_question, list_charts, make_probe_document
from autods.report.document import Chart
from autods.report.render_html import to_page
from autods.report.results.probe import Capacity, ProbeReport
from autods.report.serialize import has_probe, probe_from_dict, probe_to_dict, read_probe
from autods.runner.testing import surface
from tests.support.pages import HOSTILE, check_page
from tests.support.probes import LIMIT, MIB, Bench, ask, probed

SURFACE = surface(limit_bytes=LIMIT, state_bytes=100 * MIB, sample_bytes=100 * MIB)


def measured(folder: Path) -> ProbeReport:
    return probed(ask(folder, "rung=zero2,zero3", "micro_batch=1,2,8"), Bench(SURFACE))


def test_the_page_of_a_probe_has_cells_charts_and_trials(tmp_path: Path) -> None:
    report = measured(tmp_path)
    parsed = check_page(to_page(make_probe_document(report)))
    assert "fastest: cell" in parsed.words
    assert "samples/s by micro_batch" in parsed.words
    assert sum(tag == "tr" for tag, _ in parsed.tags) == len(report.cells) + 1
    assert sum(tag == "details" for tag, _ in parsed.tags) == len(report.trials)


def test_a_chart_of_memory_alone_shows_the_limit(tmp_path: Path) -> None:
    charts = [part for part in make_probe_document(measured(tmp_path)).parts if isinstance(part, Chart)]
    limits = {chart.title.partition(" by ")[0]: chart.limit for chart in charts}
    assert limits["device memory"] == LIMIT
    assert limits["samples/s"] is None


def test_a_probe_writes_its_page(tmp_path: Path) -> None:
    report = measured(tmp_path)
    page = (tmp_path / "out" / "report.html").read_text()
    assert page == to_page(make_probe_document(report, tmp_path / "out"))


def test_a_probe_is_read_again_as_it_was_written(tmp_path: Path) -> None:
    report = measured(tmp_path)
    assert has_probe(tmp_path / "out")
    assert read_probe(tmp_path / "out") == report
    capacity = Capacity(forecast=9, verified=8, refused=10, explanation="measured")
    cells = (replace(report.cells[0], capacity=capacity), *report.cells[1:])
    report = replace(report, cells=cells)
    assert probe_from_dict(json.loads(json.dumps(probe_to_dict(report)))) == report


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"cells": [], "trials": [], "compared": null}'])
def test_a_damaged_probe_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "probe.json").write_text(text)
    with pytest.raises(InputError, match="is not the report of a probe"):
        read_probe(tmp_path)


def test_a_probe_page_escapes_what_users_wrote(tmp_path: Path) -> None:
    report = measured(tmp_path)
    hostile = replace(report.cells[0], reason=HOSTILE, values={**report.cells[0].values, "rung": HOSTILE})
    report = replace(
        report,
        cells=(hostile, *report.cells[1:]),
        notes=(HOSTILE,),
        question=replace(report.question, workload=HOSTILE),
    )
    assert "alert(1)" in check_page(to_page(make_probe_document(report))).text


@pytest.mark.parametrize(("machine", "said"), [("box3", "MiB (box3), "), ("asked", "MiB, "), (None, "MiB, ")])
def test_a_probe_for_another_machine_names_it(tmp_path: Path, machine: str | None, said: str) -> None:
    report = measured(tmp_path)
    named = replace(report, question=replace(report.question, machine=machine))
    assert said in make_probe_document(named).question


def test_a_question_without_fixed_values_ends_with_the_memory(tmp_path: Path) -> None:
    report = measured(tmp_path)
    axes = {**report.axes, "precision": ("bf16", "fp32")}
    varied = replace(report, axes=axes, question=replace(report.question, capacity=True))
    assert describe_question(varied).endswith(" MiB")


def test_a_chart_with_too_many_lines_says_so(tmp_path: Path) -> None:
    report = measured(tmp_path)
    values = tuple(f"rung{number}" for number in range(10))
    cells = tuple(
        replace(report.cells[0], values={**report.cells[0].values, "rung": name, "micro_batch": size})
        for name in values
        for size in (1, 2)
    )
    chart, *_ = list_charts(replace(report, axes={**report.axes, "rung": values}, cells=cells))
    assert chart.title == "samples/s by micro_batch, the first 8 of 10 lines"
