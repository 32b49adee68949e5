"""The page of a probe: whole, escaped, and the same again from the files of the probe."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autods.errors import InputError
from autods.report.answers.probe import describe_answer, describe_question, list_charts, make_probe_document
from autods.report.document import Chart
from autods.report.render_html import to_page
from autods.report.results.probe import Capacity, CellResult, ProbeReport, Ratio
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


@pytest.mark.parametrize(("counts", "said"), [((1, 2), "1 or 2 cpu ranks × "), ((1, 2, 4), "1, 2 or 4 cpu ranks × ")])
def test_a_question_about_several_ranks_names_each(tmp_path: Path, counts: tuple[int, ...], said: str) -> None:
    report = measured(tmp_path)
    assert f"model on {said}" in describe_question(replace(report, axes={**report.axes, "gpus": counts}))


def compare(report: ProbeReport, *speeds: tuple[float, float | None]) -> str:
    """The headline of cells with these rates and ratios to the first one. Noise is 5 %."""
    cells = (
        CellResult(
            number=number, values={"rung": f"zero{number}"}, status="fit", samples_per_second=rate,
            ratio=None if times is None else Ratio(times=times, low=times / 1.05, high=times * 1.05),
        )
        for number, (rate, times) in enumerate(speeds, 1)
    )  # fmt: skip
    axes = {"rung": ("zero1", "zero2", "zero3")}
    return str(describe_answer(replace(report, axes=axes, cells=tuple(cells), compared=(1, "samples"))).words)


def test_a_lead_within_the_noise_is_no_fact(tmp_path: Path) -> None:
    report = measured(tmp_path)
    for cells, headline in (
        (((8.71, None), (8.68, 0.997), (5, 0.57)), "cell 1, zero1: 8.71 samples/s, within the noise of cell 2"),
        (((5, None), (8.71, 1.742), (8.6, 1.72)), "cell 2, zero2: 8.71 samples/s, within the noise of cell 3"),
        (((8, None), (8.1, 1.01), (8.2, 1.02)), "cell 3, zero3: 8.2 samples/s, within the noise of cells 1-2"),
        (((5, None), (8.71, 1.742), (7, 1.4)), "cell 2, zero2: 8.71 samples/s"),
    ):
        assert compare(report, *cells) == f"fastest: {headline}"


def test_the_fastest_cell_has_the_highest_ratio(tmp_path: Path) -> None:
    report = measured(tmp_path)
    fastest = "fastest: cell 3, zero3: 8.7 samples/s, within the noise of cell 2"
    assert compare(report, (5, None), (8.71, 1.70), (8.7, 1.74)) == fastest
    assert compare(report, (8, None), (8.1, 0.9)) == "fastest: cell 1, zero1: 8 samples/s"


def test_a_cell_without_a_ratio_is_named_beside_the_fastest(tmp_path: Path) -> None:
    headline = compare(measured(tmp_path), (5, None), (8, None), (9, 1.8))
    assert headline == "fastest: cell 3, zero3: 9 samples/s; without a ratio: cell 2"


def test_the_noise_of_two_ratios_is_that_of_the_wider_one() -> None:
    narrow, wide = Ratio(times=1.7, low=1.69, high=1.71), Ratio(times=1.8, low=1.6, high=2.025)
    assert not narrow.differs_from(wide)
    assert not wide.differs_from(narrow)
    assert wide.differs_from(Ratio(times=1, low=1, high=1))


def search(report: ProbeReport, *capacities: Capacity) -> str:
    """The headline of cells with these capacities."""
    cells = (
        CellResult(number=number, values={"rung": f"zero{number}"}, status="fit", capacity=capacity)
        for number, capacity in enumerate(capacities, 1)
    )
    question = replace(report.question, capacity=True, forecast_only=capacities[0].verified is None)
    axes = {"rung": ("zero1", "zero2", "zero3")}
    return str(describe_answer(replace(report, axes=axes, cells=tuple(cells), question=question)).words)


def test_the_largest_micro_batch_is_as_certain_as_its_cell(tmp_path: Path) -> None:
    report = measured(tmp_path)
    eight, more = Capacity(verified=8, refused=9, exact=True), Capacity(verified=8)
    for cells, headline in (
        ((eight, Capacity(verified=7, refused=8, exact=True)), "8 with zero1, by trials"),
        ((more, Capacity(verified=7, refused=9)), "8 or more with zero1, by trials"),
        ((eight, more), "8 or more with zero2, by trials"),
        ((more, Capacity(verified=7, refused=40)), "8 or more with zero1, by trials; maybe larger in cell 2"),
        ((eight, Capacity(verified=4), eight), "8 with zero1, by trials; as large in cell 3; maybe larger in cell 2"),
        ((Capacity(forecast=8000), Capacity(forecast=8000)), "8,000 with zero1, by the forecast; as large in cell 2"),
    ):
        assert search(report, *cells) == f"largest micro batch: {headline}"


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
