"""Turns, noise and ratios: what a table says of cells that were measured several times."""

from __future__ import annotations

from pathlib import Path

import pytest

from autods.prober.grid import list_cells
from autods.prober.measure import compare_cells, measure_in_turns, share_results, summarize_cell
from autods.runner.testing import ScriptedRunner, failed, fit, out_of_memory
from autods.tuner.comparison import relative_deviation
from autods.types import Outcome, Trial
from tests.support.probes import FACTS, LIMIT, MIB, ask


def test_turns_run_forth_and_back(tmp_path: Path) -> None:
    runner = ScriptedRunner(lambda trial: fit(peak_bytes=MIB))
    cells = list_cells(ask(tmp_path, "micro_batch=1,2,4"), lambda conditions: (FACTS, {}))
    measure_in_turns(cells, runner.run, repeats=3)
    asked = [(trial.repeat, trial.knobs.micro_batch) for trial in runner.trials]
    assert asked == [(0, 1), (0, 2), (0, 4), (1, 4), (1, 2), (1, 1), (2, 1), (2, 2), (2, 4)]


def test_out_of_memory_and_lasting_failures_are_not_repeated(tmp_path: Path) -> None:
    answers: dict[int, Outcome] = {
        1: fit(peak_bytes=MIB), 2: out_of_memory(), 3: failed(failure="user_code", action="fix_code"),
        4: failed(failure="communication"),
    }  # fmt: skip
    runner = ScriptedRunner(lambda trial: answers[trial.knobs.micro_batch])
    cells = list_cells(ask(tmp_path, "micro_batch=1,2,3,4"), lambda conditions: (FACTS, {}))
    found = measure_in_turns(cells, runner.run, repeats=3)
    assert [len(found[number]) for number in (1, 2, 3, 4)] == [3, 1, 1, 3]


def test_cells_that_are_the_same_in_effect_share_one_trial(tmp_path: Path) -> None:
    runner = ScriptedRunner(lambda trial: fit(peak_bytes=MIB, samples_per_second=7))
    cells = list_cells(ask(tmp_path, "rung=zero1", "pin_memory=on,off"), lambda conditions: (FACTS, {}))
    found = measure_in_turns(cells, runner.run, repeats=2)
    own, reference = compare_cells({1: summarize_cell(cells[0], found[1])}, found, by_tokens=False)
    first, second = share_results(cells, own)
    assert len(runner.trials) == 2
    assert (reference, second.same_as, second.samples_per_second) == (1, 1, 7)
    assert (first.values["pin_memory"], second.values["pin_memory"]) == (True, False)


def test_a_cell_has_the_median_speed_and_the_highest_peak(tmp_path: Path) -> None:
    rates, peaks = iter([3.0, 1.0, 2.0]), iter([5 * MIB, 9 * MIB, 7 * MIB])
    cells = list_cells(ask(tmp_path, "micro_batch=1,64"), lambda conditions: (FACTS, {}))

    def answer(trial: Trial) -> Outcome:
        if trial.knobs.micro_batch > 1:
            return out_of_memory(missing_bytes=64 * MIB)
        return fit(peak_bytes=next(peaks), samples_per_second=next(rates), limit_bytes=LIMIT)

    found = measure_in_turns(cells, ScriptedRunner(answer).run, repeats=3)
    fits, lacks = (summarize_cell(cell, found[cell.number]) for cell in cells)
    assert (fits.status, fits.samples_per_second, fits.repeats) == ("fit", 2.0, 3)
    assert fits.memory["device"].peak_bytes == 9 * MIB
    assert fits.spread == pytest.approx(0.5)
    assert (lacks.status, lacks.tier, lacks.missing_bytes) == ("out_of_memory", "device", 64 * MIB)
    assert "wanted 64.0 MiB" in lacks.reason


def test_a_fluke_among_repeats_is_said_and_the_cell_still_fits(tmp_path: Path) -> None:
    cells = list_cells(ask(tmp_path), lambda conditions: (FACTS, {}))
    answers = iter([failed(failure="communication"), fit(peak_bytes=MIB), fit(peak_bytes=MIB)])
    found = measure_in_turns(cells, ScriptedRunner(lambda trial: next(answers)).run, repeats=3)
    result = summarize_cell(cells[0], found[1])
    assert (result.status, result.repeats) == ("fit", 2)
    assert "failed (communication)" in result.reason


def test_one_measurement_has_no_spread() -> None:
    assert relative_deviation([1.0]) is None
    assert relative_deviation([1.0, 3.0]) == pytest.approx(0.7071, rel=1e-3)
