"""Of a small model no forecast is waited for; of any other nothing changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autods.runner.testing import ScriptedRunner, failed, fit
from autods.tuner.candidates import candidates
from autods.tuner.ladder_walk import walk
from autods.tuner.spared import Spared
from autods.types import Knobs, Outcome, Record, Trial
from tests.support.foresights import Scripted, said
from tests.support.walks import FACTS, FITS, OOM, SETTINGS, STEPS

GIB = 2**30
SIZES = range(1, 1000)
FIRST = Trial(rung="ddp", knobs=Knobs(), purpose="walk")


def spared(*, parameters: int = 4_000_000, device_bytes: int = 4 * GIB) -> tuple[Spared, Scripted]:
    inner = Scripted(lambda trial: said(trial.rung, "fits"), batch=700)
    return Spared(inner, lambda: replace(FACTS, parameters=parameters), device_bytes), inner


def saw(trial: Trial, outcome: Outcome) -> Record:
    return Record(id=1, trial=trial, outcome=outcome, seconds=1.0)


def test_a_small_model_is_tried_without_a_forecast() -> None:
    foresight, inner = spared()
    foresight.prepare([FIRST])
    assert foresight.forecast(FIRST) is None
    assert (inner.prepared, inner.asked) == ([], [])


@pytest.mark.parametrize(
    "model",
    [{"parameters": 150_000_000}, {"parameters": 300_000_000, "device_bytes": 80 * GIB}, {"device_bytes": GIB // 8}],
    ids=["fills half of the device", "its trials are slow", "the device is smaller than what any engine needs"],
)
def test_any_other_model_is_forecast(model: dict[str, int]) -> None:
    foresight, inner = spared(**model)
    foresight.prepare([FIRST])
    assert foresight.forecast(FIRST) is not None
    assert (inner.prepared, inner.asked) == (["ddp"], ["ddp"])


def test_before_the_model_was_looked_at_nothing_is_obvious() -> None:
    inner = Scripted(lambda trial: said(trial.rung, "fits"))
    assert Spared(inner, lambda: None, 80 * GIB).forecast(FIRST) is not None


def test_a_larger_micro_batch_is_forecast() -> None:
    foresight, _ = spared()
    assert foresight.forecast(replace(FIRST, knobs=Knobs(micro_batch=8))) is not None


def test_where_a_small_model_runs_out_all_the_same_the_other_rungs_are_forecast() -> None:
    foresight, inner = spared()

    def answer(trial: Trial) -> Outcome:
        outcome = FITS if trial.rung == "zero2" else OOM
        foresight.saw(saw(trial, outcome))
        return outcome

    inner.answer = lambda trial: said(trial.rung, "cannot_fit" if trial.rung == "zero1" else "fits")
    runner = ScriptedRunner(answer)
    walked = walk(candidates(SETTINGS, FACTS, {}), runner.run, STEPS, foresight=foresight)
    assert walked.winner is not None
    assert [trial.rung for trial in runner.trials if not trial.repeat] == ["ddp", "zero2"]
    assert inner.asked == ["zero1", "zero2"]


def test_the_first_jump_of_a_small_model_is_to_what_fits_even_if_all_of_its_peak_grew() -> None:
    foresight, _ = spared()
    foresight.saw(saw(FIRST, fit(peak_bytes=GIB // 8)))
    assert foresight.largest(FIRST, SIZES, 3.9 * GIB) == 31


@pytest.mark.parametrize(
    ("foresight", "peak_bytes"),
    [(spared()[0], GIB), (spared(parameters=300_000_000, device_bytes=80 * GIB)[0], GIB // 8)],
    ids=["little room is left", "large"],
)
def test_elsewhere_the_forecast_says_how_far_to_jump(foresight: Spared, peak_bytes: int) -> None:
    foresight.saw(saw(FIRST, fit(peak_bytes=peak_bytes)))
    assert foresight.largest(FIRST, SIZES, 3.9 * GIB) == 700


def test_what_ran_out_at_a_larger_micro_batch_says_nothing_of_the_first() -> None:
    foresight, _ = spared()
    foresight.saw(saw(replace(FIRST, knobs=Knobs(micro_batch=64)), OOM))
    assert foresight.forecast(FIRST) is None


def test_what_cannot_be_trained_with_one_sample_is_as_obvious_with_two() -> None:
    foresight, inner = spared()
    foresight.saw(saw(FIRST, replace(failed(action="fix_code"), wants_larger_batch=True)))
    with_two = replace(FIRST, knobs=Knobs(micro_batch=2))
    assert foresight.forecast(with_two) is None
    foresight.saw(saw(with_two, fit(peak_bytes=GIB // 8)))
    assert foresight.largest(with_two, SIZES, 3.9 * GIB) == 62
    assert inner.asked == []


@pytest.mark.parametrize(("parameters", "largest"), [(4_000_000, None), (400_000_000, 700)])
def test_a_scripts_small_model_grows_by_trials(parameters: int, largest: int | None) -> None:
    inner = Scripted(lambda trial: said(trial.rung, "fits"), batch=700)
    foresight = Spared(inner, lambda: replace(FACTS, parameters=parameters, config={}), 80 * GIB)
    foresight.saw(saw(FIRST, fit(peak_bytes=GIB)))
    assert foresight.largest(FIRST, SIZES, 3.9 * GIB) == largest
