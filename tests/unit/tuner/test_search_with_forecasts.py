"""Forecasts in the search: they save trials and never lose an answer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autods.config.catalogue import describe_this_machine
from autods.config.profiles import GrowLimits, TuneLimits
from autods.forecast.testing import ScriptedSimulator, simulate_peaks
from autods.forecast.values import RungForecast, Verdict
from autods.journal import Journal, TrialStore
from autods.report.results.fit import ClosestRung
from autods.runner.testing import ScriptedRunner, fit, surface
from autods.tuner.batch_size import Growth
from autods.tuner.candidates import list_candidates
from autods.tuner.forecaster import StepForecast
from autods.tuner.ladder_walk import WalkResult, find_closest_rung, walk_ladder
from autods.tuner.optuna_search import TuneResult, tune
from autods.tuner.trial_forecasts import TrialForecaster, open_forecaster
from autods.types import Outcome, Trial
from tests.support.contexts import make_context
from tests.support.forecasters import ScriptedForecaster, scripted_forecast
from tests.support.machines import a_machine
from tests.support.walks import FACTS, FITS, OOM, SETTINGS, STEPS, TOO_SMALL

pytestmark = pytest.mark.timeout(120)  # Optuna's Gaussian process is slow on a loaded machine

GIB = 2**30


def growth(
    answers: Mapping[str, Outcome], verdicts: Mapping[str, RungForecast]
) -> tuple[WalkResult, list[str], ScriptedForecaster]:
    runner = ScriptedRunner(lambda trial: answers.get(trial.rung, OOM))
    forecaster = ScriptedForecaster(lambda trial: verdicts.get(trial.rung))
    context = make_context(runner.run, forecaster=forecaster)
    walked = walk_ladder(list_candidates(SETTINGS, FACTS, {}), context)
    return walked, list(dict.fromkeys(trial.rung for trial in runner.trials)), forecaster


def test_rungs_are_forecast_at_the_smallest_trainable_batch() -> None:
    asked: list[int] = []

    def answer(trial: Trial) -> Outcome:
        fits_or_not = FITS if trial.rung == "zero2" else OOM
        return TOO_SMALL if trial.knobs.micro_batch < 2 else fits_or_not

    forecaster = ScriptedForecaster(lambda trial: asked.append(trial.knobs.micro_batch))
    context = make_context(ScriptedRunner(answer).run, forecaster=forecaster)
    walk_ladder(list_candidates(SETTINGS, FACTS, {}), context)
    assert asked == [1] + [2] * (len(asked) - 1)
    assert len(asked) > 1


def test_a_rung_that_cannot_fit_is_not_tried_and_the_reason_is_said() -> None:
    walked, tried, _ = growth(
        {"zero2": FITS}, {"ddp": scripted_forecast("ddp", "cannot_fit"), "zero1": scripted_forecast("zero1", "tight")}
    )
    assert tried == ["zero1", "zero2"]
    assert {skip.rung: skip.reason for skip in walked.skipped} == {"ddp": "cannot fit by the forecast: needs more"}
    assert walked.winner is not None
    assert walked.winner.trial.rung == "zero2"


@pytest.mark.parametrize("verdict", ["fits", "tight", None])
def test_only_trials_decide_what_may_fit(verdict: Verdict | None) -> None:
    verdicts = {} if verdict is None else {"ddp": scripted_forecast("ddp", verdict)}
    _, tried, _ = growth({"zero1": FITS}, verdicts)
    assert tried == ["ddp", "zero1"]


def test_where_nothing_fits_the_closest_rung_runs_nevertheless() -> None:
    rungs = [rung.name for rung in SETTINGS.ladder]
    verdicts = {name: scripted_forecast(name, "cannot_fit", low=10 - index) for index, name in enumerate(rungs)}
    walked, tried, _ = growth({}, verdicts)
    assert tried == [rungs[-1]]
    assert rungs[-1] not in {skip.rung for skip in walked.skipped}


def test_no_trial_overfills_the_host_on_purpose() -> None:
    rungs = [rung.name for rung in SETTINGS.ladder]
    verdicts = {name: scripted_forecast(name, "cannot_fit", low=10) for name in rungs}
    verdicts |= {name: scripted_forecast(name, "cannot_fit", low=2, tier="host") for name in rungs[2:]}
    _, tried, _ = growth({}, verdicts)
    assert tried == [rungs[0]]
    walked, tried, _ = growth({}, {name: scripted_forecast(name, "cannot_fit", low=2, tier="host") for name in rungs})
    assert (tried, walked.winner) == ([], None)
    assert {skip.rung for skip in walked.skipped} == set(rungs)


def test_where_no_rung_is_tried_forecasts_tell_the_closest() -> None:
    rungs = [rung.name for rung in SETTINGS.ladder]
    verdicts = {name: scripted_forecast(name, "cannot_fit", low=9 + n, tier="host") for n, name in enumerate(rungs)}
    forecaster = ScriptedForecaster(lambda trial: verdicts.get(trial.rung), forecasts=verdicts)
    context = make_context(ScriptedRunner(lambda trial: OOM).run, forecaster=forecaster)
    walked = walk_ladder(list_candidates(SETTINGS, FACTS, {}), context)
    assert find_closest_rung(walked, context) == ClosestRung(rung=rungs[0], missing_bytes=8, tier="host")
    forecaster.forecasts.clear()
    assert find_closest_rung(walked, context) is None


def test_a_trial_counts_for_the_closest_rung_before_forecasts() -> None:
    verdicts = {"ddp": scripted_forecast("ddp", "cannot_fit", low=2, tier="host")}
    forecaster = ScriptedForecaster(lambda trial: verdicts.get(trial.rung), forecasts=verdicts)
    context = make_context(ScriptedRunner(lambda trial: replace(OOM, tier="host")).run, forecaster=forecaster)
    walked = walk_ladder(list_candidates(SETTINGS, FACTS, {}), context)
    assert walked.records
    assert find_closest_rung(walked, context) is None  # it is not known how much the trials lacked


def test_a_forecast_that_was_wrong_costs_no_answer() -> None:
    verdicts = {rung.name: scripted_forecast(rung.name, "cannot_fit") for rung in SETTINGS.ladder}
    walked, _, _ = growth({rung.name: FITS for rung in SETTINGS.ladder}, verdicts)
    assert walked.winner is not None


def test_rungs_after_the_first_that_fits_are_not_forecast() -> None:
    _, _, forecaster = growth({"ddp": FITS}, {})
    assert forecaster.asked == ["ddp"]


ANSWER = surface(limit_bytes=16 * GIB, state_bytes=2 * GIB, sample_bytes=GIB // 4)


def grown(batch: int | None) -> tuple[int, ScriptedRunner]:
    """The largest micro batch that fits, and what ran."""
    runner = ScriptedRunner(ANSWER)
    first = runner.run(Trial(rung="zero2", knobs=list_candidates(SETTINGS, FACTS, {})[2].knobs, purpose="walk"))
    limits = GrowLimits(most_trials=8, most_micro_batch=512, gain=1.05)
    forecaster = ScriptedForecaster(lambda trial: None, batch)
    context = make_context(runner.run, forecaster=forecaster, profile={"grow": limits}, device_bytes=16 * GIB)
    growth = Growth(context=context, first=first.trial, walked=first, most_trials=8, steps=STEPS)
    return growth.run().curve.fits, runner


def test_growth_starts_at_the_forecast_micro_batch() -> None:
    largest, runner = grown(52)
    assert runner.trials[1].knobs.micro_batch == 52
    assert largest == 52
    assert len(runner.trials) < len(grown(None)[1].trials)


@pytest.mark.parametrize("wrong", [20, 80, 400])
def test_growth_finds_the_same_micro_batch_by_a_wrong_forecast(wrong: int) -> None:
    assert abs(grown(wrong)[0] - grown(None)[0]) <= 3


def bent_peak(micro_batch: int) -> int:
    """A peak that is the larger of two lines, which cross at 13 samples; 30 samples leave the headroom of 16 GiB."""
    return int(max(4 + micro_batch / 5, micro_batch / 2) * GIB)


class BentForecaster(ScriptedForecaster):
    """Forecasts the memory of such a peak, and steps that hardly grow with the micro batch."""

    def step_time(self, trial: Trial) -> StepForecast:
        seconds = 1 + trial.knobs.micro_batch / 1000
        return StepForecast(seconds=seconds, low_seconds=seconds, computed_seconds=seconds)


@pytest.mark.parametrize("measured", [[4], [4, 8]])
def test_growth_goes_where_the_forecast_bends(measured: list[int]) -> None:
    def forecast(trial: Trial) -> RungForecast:
        return scripted_forecast(trial.rung, "fits", low=bent_peak(trial.knobs.micro_batch), limit=16 * GIB)

    def answer(trial: Trial) -> Outcome:
        peak = bent_peak(trial.knobs.micro_batch)
        steady = surface(limit_bytes=16 * GIB, state_bytes=peak, sample_bytes=0, step_overhead_s=1, sample_s=0.001)
        return steady(trial)

    runner = ScriptedRunner(answer)
    context = make_context(runner.run, forecaster=BentForecaster(forecast, 30), device_bytes=16 * GIB)
    first = Trial(rung="zero2", knobs=list_candidates(SETTINGS, FACTS, {})[2].knobs, purpose="walk")
    growth = Growth(context=context, first=first, most_trials=8, steps=STEPS)
    for micro_batch in measured:
        growth.measure(micro_batch)
    assert growth.run().curve.fits == 30
    assert [trial.knobs.micro_batch for trial in runner.trials] == [*measured, 30]


def tuned(tmp_path: Path, forecaster: ScriptedForecaster) -> tuple[TuneResult, ScriptedRunner]:
    runner = ScriptedRunner(ANSWER)
    candidate = list_candidates(SETTINGS, FACTS, {})[2]
    start = runner.run(Trial(rung="zero2", knobs=replace(candidate.knobs, micro_batch=8), purpose="grow"))
    context = make_context(
        runner.run, forecaster=forecaster, study=tmp_path / "study.jsonl", device_bytes=16 * GIB, seed=1,
        profile={"tune": TuneLimits(trials=6, gain=1.03, turns=1), "timed": STEPS},
    )  # fmt: skip
    return tune(start, context), runner


def test_tuning_runs_no_setting_that_cannot_fit(tmp_path: Path) -> None:
    key = "zero_optimization.reduce_bucket_size"

    def too_large(trial: Trial) -> RungForecast | None:
        large = int(trial.knobs.settings[key]) > SMALL
        return scripted_forecast("zero2", "cannot_fit", low=17 * GIB, limit=16 * GIB) if large else None

    SMALL = int(list_candidates(SETTINGS, FACTS, {})[2].knobs.settings[key])
    found, runner = tuned(tmp_path, ScriptedForecaster(too_large))
    assert all(int(trial.knobs.settings[key]) <= SMALL for trial in runner.trials)
    assert "cannot fit by the forecast" in found.reason


def test_the_same_search_without_forecasts_asks_for_more_trials(tmp_path: Path) -> None:
    _, trials = tuned(tmp_path, ScriptedForecaster(lambda trial: None))
    assert len(trials.trials) == 1 + 6


def test_the_nodes_memory_is_the_limit_not_the_drivers(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    run: Any = None
    store = TrialStore(journal, journal.open(fingerprint="1"), run, lambda event: None)
    hardware = a_machine(host_gib=2048)
    settings = replace(SETTINGS, device="cuda", machine=describe_this_machine(hardware.cards, hardware))
    start: Any = nullcontext  # no simulation runs
    with open_forecaster(settings, FACTS, store, lambda event: None, start) as forecaster:
        assert isinstance(forecaster, TrialForecaster)
        assert forecaster.settings.site.machine.host_bytes == 2048 * GIB


def test_a_resumed_fit_forecasts_as_its_first_run_did(tmp_path: Path) -> None:
    """A measurement corrects the forecasts after its trial, and none before it."""
    trials = [
        Trial(rung=each.rung.name, knobs=each.knobs, purpose="walk")
        for each in list_candidates(SETTINGS, FACTS, {})[:3]
    ]
    runner = ScriptedRunner(lambda trial: fit(peak_bytes=2 * GIB))
    simulator: Any = nullcontext(ScriptedSimulator(FACTS, lambda *_: simulate_peaks(1, backward=GIB)))
    forecasts = []
    for _ in range(2):
        journal = Journal(tmp_path / "journal.jsonl")
        store = TrialStore(journal, journal.open(fingerprint="1"), lambda trial, id: runner.run(trial), lambda _: None)
        with open_forecaster(SETTINGS, FACTS, store, lambda event: None, lambda _: simulator) as forecaster:
            for trial in trials:
                forecasts.append(forecaster.forecast(trial))
                store.run(trial)
    assert runner.trials == trials
    assert forecasts[:3] == forecasts[3:]
    middles = [forecast.memory["device"].peak_bytes for forecast in forecasts if forecast is not None]
    assert middles[0] < middles[1] < middles[2]
