"""The order in which configs are tried: by what the forecast expects of each at its best micro batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from autods.config.checkpointing import find_state
from autods.forecast.values import RungForecast, TierForecast
from autods.runner.testing import ScriptedRunner
from autods.tuner.candidates import list_candidates
from autods.tuner.forecaster import Forecaster, StepForecast
from autods.tuner.ladder_walk import walk_ladder
from autods.tuner.prospects import MOST_AT_FIRST, Prospect, find_prospect, offload_where_needed, order_by_time, rank
from autods.types import Trial
from tests.support.contexts import make_context
from tests.support.walks import FACTS, FITS, SETTINGS

CANDIDATES = list_candidates(SETTINGS, FACTS, {})
GIB = 2**30
NAMES = [candidate.rung.name for candidate in CANDIDATES]


@dataclass
class Timed(Forecaster):
    """Forecasts seconds of a sample by rung, at best half of them, and the largest micro batch."""

    sample_s: dict[str, float]
    most: int | None = 8
    least: float = 0.5  # share of the time
    plain: float = 1.0  # a sample's share of time without checkpointing

    def step_time(self, trial: Trial) -> StepForecast | None:
        if (sample_s := self.sample_s.get(trial.rung)) is None:
            return None
        share = 1.0 if trial.knobs.checkpointing else self.plain
        step_s = share * sample_s * trial.knobs.micro_batch * trial.knobs.accumulation
        return StepForecast(seconds=step_s, low_seconds=self.least * step_s, computed_seconds=0.0)

    def largest(self, trial: Trial, sizes: Any, usable_bytes: float) -> int | None:
        return self.most


@dataclass
class Full(Forecaster):
    """Forecasts 8 GiB that do not fit 4, of which layers' inputs are `inputs_gib`."""

    inputs_gib: int

    def forecast(self, trial: Trial) -> RungForecast:
        offloads = find_state(trial.knobs) == "offload"
        size = (8 - self.inputs_gib * offloads) * GIB
        return RungForecast(
            rung=trial.rung, verdict="fits" if size <= 4 * GIB else "cannot_fit", reason="", micro_batch=1,
            memory={"device": TierForecast(low_bytes=size, peak_bytes=size, high_bytes=size, limit_bytes=4 * GIB)},
            breakdown={"activations": (self.inputs_gib + 1) * GIB}, offloads_inputs=offloads,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("inputs_gib", "device", "state"), [(5, "cuda", "offload"), (5, "cpu", "on"), (3, "cuda", "on"), (2, "cuda", "on")]
)
def test_inputs_are_on_the_host_where_nothing_else_fits(inputs_gib: int, device: str, state: str) -> None:
    context = make_context(ScriptedRunner(lambda trial: FITS).run, forecaster=Full(inputs_gib), device=device)
    chosen = offload_where_needed(CANDIDATES, context)
    assert {find_state(candidate.knobs) for candidate in chosen if candidate.skip is None} == {state}


def ordered(forecaster: Forecaster) -> list[str]:
    context = make_context(ScriptedRunner(lambda trial: FITS).run, forecaster=forecaster)
    return [candidate.rung.name for candidate in order_by_time(CANDIDATES, context)]


def test_the_fastest_by_the_forecast_comes_first() -> None:
    assert ordered(Timed({"ddp": 3.0, "zero2": 2.0, "zero3": 1.0}))[:3] == ["zero3", "zero2", "ddp"]


def test_without_times_the_order_is_the_ladders() -> None:
    assert ordered(Forecaster()) == NAMES


def test_the_ladder_decides_between_equal_times() -> None:
    assert ordered(Timed({"zero3": 0.99, "zero1": 1.0, "ddp": 1.5}))[:3] == ["zero1", "zero3", "ddp"]


def test_rungs_without_a_time_follow_those_with_one() -> None:
    assert ordered(Timed({"zero3": 1.0}))[:3] == ["zero3", "ddp", "zero1"]


def test_a_rung_that_keeps_states_on_nvme_comes_last() -> None:
    assert ordered(Timed({"zero3-nvme": 0.1, "zero3": 1.0}))[-1] == "zero3-nvme"


def test_the_walk_tries_the_fastest_rung_first() -> None:
    runner = ScriptedRunner(lambda trial: FITS)
    walked = walk_ladder(CANDIDATES, make_context(runner.run, forecaster=Timed({"ddp": 2.0, "zero3": 1.0})))
    assert walked.winner is not None
    assert [trial.rung for trial in runner.trials] == ["zero3"]
    assert walked.winner.trial.knobs.micro_batch == 1


def test_without_a_least_time_a_prospect_may_be_any_fast() -> None:
    context = make_context(ScriptedRunner(lambda trial: FITS).run, forecaster=Timed({"ddp": 0.5}, least=0.0))
    prospect = find_prospect(CANDIDATES[0], context)
    assert prospect is not None
    assert (prospect.rate, prospect.most_rate) == (pytest.approx(4.0), float("inf"))


def test_a_prospect_has_the_rates_of_its_best_micro_batch() -> None:
    context = make_context(ScriptedRunner(lambda trial: FITS).run, forecaster=Timed({"ddp": 0.5}))
    prospect = find_prospect(CANDIDATES[0], context)  # 2 ranks of 0.5 s a sample
    assert prospect == Prospect(
        micro_batch=8, largest=8, rate=pytest.approx(4.0), most_rate=pytest.approx(8.0), sample_s=0.5
    )


def test_a_prospect_keeps_the_global_batch() -> None:
    context = make_context(ScriptedRunner(lambda trial: FITS).run, forecaster=Timed({"ddp": 0.5}), global_batch=64)
    prospect = find_prospect(CANDIDATES[0], context)
    assert prospect is not None
    assert (prospect.micro_batch, prospect.rate) == (8, pytest.approx(4.0))


def test_a_first_micro_batch_is_no_larger_than_64() -> None:
    context = make_context(ScriptedRunner(lambda trial: FITS).run, forecaster=Timed({"ddp": 0.5}, most=4000))
    prospect = find_prospect(CANDIDATES[0], context)
    assert prospect is not None
    assert (prospect.micro_batch, prospect.largest) == (MOST_AT_FIRST, 4000)


def test_what_cannot_fit_has_no_prospect() -> None:
    context = make_context(ScriptedRunner(lambda trial: FITS).run, forecaster=Timed({"ddp": 0.5}, most=None))
    assert find_prospect(CANDIDATES[0], context) is None


def test_the_least_memory_needs_no_forecast_of_time() -> None:
    context = make_context(ScriptedRunner(lambda trial: FITS).run, forecaster=Timed({"ddp": 0.5}), objective="memory")
    assert find_prospect(CANDIDATES[0], context) is None


def test_equal_rates_are_compared_with_the_fastest_left() -> None:
    assert rank(["a", "b", "c", "d"], [97.5, None, 95.0, 100.0]) == ["a", "d", "c", "b"]
