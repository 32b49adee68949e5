"""Tuning: proposals, trials, resumption after a kill, convergence, and when the start stays."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock, JournalStorage

from autods.config.profiles import Budget, TuneLimits
from autods.config.rungs import read_rungs
from autods.forecast.values import RungForecast, TierForecast, Verdict
from autods.journal import trial_key
from autods.runner.testing import ScriptedRunner, failed, fit, out_of_memory
from autods.tuner.comparison import confirm_gain
from autods.tuner.forecaster import Forecaster, StepForecast
from autods.tuner.optuna_search import (
    STARTUP,
    WAIT,
    Sampler,
    TuneResult,
    gp_sampler,
    has_converged,
    space_of,
    tune,
)
from autods.tuner.trials import FitContext, memory_score
from autods.types import Fit, Knobs, Outcome, OutOfMemory, Record, Run, Scalar, Steps, Trial
from tests.support.contexts import make_context
from tests.support.walks import SETTINGS

pytestmark = pytest.mark.timeout(120)  # Optuna's Gaussian process is slow on a loaded machine

RUNG = read_rungs()["zero2"]
BUCKET = "zero_optimization.reduce_bucket_size"
OVERLAP = "zero_optimization.overlap_comm"
LIMIT = 1_000_000_000
TIMED = Steps(warmup=2, timed=3, most_timed=12)
KNOBS = Knobs(micro_batch=4, settings={BUCKET: 10_000_000, "zero_optimization.allgather_bucket_size": 10_000_000})
START = Trial(rung="zero2", knobs=KNOBS, purpose="grow", steps=TIMED)


def bucket_of(trial: Trial) -> int:
    size = trial.knobs.settings[BUCKET]
    assert isinstance(size, int)
    return size


def hill(trial: Trial) -> Outcome:
    """Fastest at a bucket of 40M elements with overlap_comm, and each element of the bucket costs 8 bytes."""
    peak = 500_000_000 + 8 * bucket_of(trial)
    if peak > LIMIT:
        return out_of_memory(missing_bytes=peak - LIMIT)
    speed = 100 * math.exp(-0.1 * math.log(bucket_of(trial) / 40e6) ** 2)
    return fit(peak_bytes=peak, samples_per_second=speed * (1.1 if trial.knobs.settings.get(OVERLAP) else 1.0))


@dataclass
class Journaled:
    """A runner that answers a known question from its journal, and can be killed at a trial."""

    answer: Callable[[Trial], Outcome]
    records: dict[str, Record] = field(default_factory=dict)
    ran: list[Trial] = field(default_factory=list)
    kill_at: int | None = None

    def __call__(self, trial: Trial) -> Record:
        key = trial_key(trial)
        if key not in self.records:
            if len(self.ran) == self.kill_at:
                self.kill_at = None
                raise KeyboardInterrupt
            self.ran.append(trial)
            self.records[key] = Record(id=len(self.ran), trial=trial, outcome=self.answer(trial), seconds=1.0)
        return self.records[key]

    @property
    def tuned(self) -> list[Trial]:
        return [trial for trial in self.ran if trial.purpose == "tune"]


def tuning(
    run: Journaled,
    path: Path,
    *,
    trials: int = 8,
    headroom: float = 0.05,
    start: Trial = START,
    stop_gain: float = 0.01,
    sampler: Sampler = gp_sampler,
    priced: int = 0,
    **options: Any,
) -> TuneResult:
    """`options` are settings, or the forecaster."""
    context = tuning_context(run, path, trials=trials, headroom=headroom, priced=priced, **options)
    return tune(context.run(start), context, stop_gain=stop_gain, sampler=sampler)


def by_chance(seed: int) -> optuna.samplers.BaseSampler:
    """For a search of which only the end is looked at: it costs no Gaussian process."""
    return optuna.samplers.RandomSampler(seed=seed)


def tuning_context(
    run: Run, path: Path, *, trials: int = 8, priced: int = 0, turns: int = 2, headroom: float = 0.05, **options: Any
) -> FitContext:
    profile = {
        "tune": TuneLimits(trials=trials, priced=priced, gain=1.03, turns=turns),
        "timed": TIMED,
        "certify": replace(SETTINGS.profile.certify, most_trials=0),
    }
    return make_context(run, study=path, headroom=headroom, profile=profile, device_bytes=LIMIT, **options)


def confirming(start: Record, leaders: list[Record], run: Run, *, turns: int = 2, **options: Any) -> tuple[Record, str]:
    return confirm_gain(start, leaders, tuning_context(run, Path("unused"), turns=turns, **options))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "study.jsonl"


def test_tuning_finds_a_faster_setting_and_confirms_it_in_turn(path: Path) -> None:
    run = Journaled(hill)
    tuned = tuning(run, path)
    assert tuned.best.trial.knobs.settings[OVERLAP] is True
    assert isinstance(tuned.best.outcome, Fit)
    assert tuned.best.outcome.samples_per_second > 1.1 * 82.5  # of the start
    verified = [trial for trial in run.ran if trial.purpose == "verify"]
    turns = [[trial for trial in verified if trial.repeat == turn] for turn in (1, 2)]
    assert verified == turns[0] + turns[1]
    for turn in turns:
        assert [trial.knobs == START.knobs for trial in turn] == [True] + [False] * (len(turn) - 1)
    assert "measured again in turn" in tuned.reason


class Computing(Forecaster):
    """Forecasts a step of one second, of which the card computes a share."""

    def __init__(self, computes: float) -> None:
        self.step = StepForecast(seconds=1.0, low_seconds=0.0, computed_seconds=computes)

    def step_time(self, trial: Trial) -> StepForecast:
        return self.step


@pytest.mark.parametrize(
    ("computes", "measured_s", "is_skipped"),
    [(0.99, 1.0, True), (0.9, 1.0, False), (0.0, 1.0, False), (0.99, 1.1, False)],
)
def test_tuning_is_skipped_where_no_setting_can_gain(
    path: Path, computes: float, measured_s: float, is_skipped: bool
) -> None:
    """What the forecast does not explain of a longer step may be what a setting mends."""
    run = Journaled(lambda trial: fit(peak_bytes=500_000_000, step_s=measured_s))
    tuned = tuning(run, path, forecaster=Computing(computes), sampler=by_chance, trials=2)
    assert (not run.tuned) is is_skipped
    if is_skipped:
        assert tuned.reason == (
            "skipped: by the forecast, links, host and launches hold up 1.0% of a step, and a gain counts from 3% on"
        )


class Pricing(Forecaster):
    """Forecasts a machine's steps: `seconds(trial)`, and a peak of 500 MB."""

    def __init__(self, seconds: Callable[[Trial], float]) -> None:
        self.seconds = seconds

    def forecast(self, trial: Trial) -> RungForecast:
        use = TierForecast(peak_bytes=500_000_000, low_bytes=0, high_bytes=0, limit_bytes=LIMIT)
        return RungForecast(rung=trial.rung, verdict="fits", reason="", micro_batch=4, memory={"device": use})

    def step_time(self, trial: Trial) -> StepForecast:
        return StepForecast(seconds=self.seconds(trial), low_seconds=0.0, computed_seconds=0.0)


def lasts(trial: Trial) -> float:
    """A second where the bucket is best, and a twentieth more for each halving or doubling of it."""
    return 1.0 + 0.05 * abs(math.log2(bucket_of(trial) / 40e6))


def test_settings_that_are_priced_are_run_if_they_promise(path: Path) -> None:
    run = Journaled(lambda trial: fit(peak_bytes=500_000_000, step_s=lasts(trial), samples_per_second=1 / lasts(trial)))
    tuned = tuning(run, path, forecaster=Pricing(lasts), priced=24)
    assert len(run.tuned) == 3
    assert all(lasts(trial) < lasts(START) / 1.015 for trial in run.tuned)
    assert tuned.best.trial.knobs.settings != START.knobs.settings
    assert tuned.reason.startswith("3 other settings of zero2 were tried, the best of 24 by the forecast; measured ")


def test_settings_that_promise_too_little_are_not_run(path: Path) -> None:
    run = Journaled(lambda trial: fit(peak_bytes=500_000_000))
    tuned = tuning(run, path, forecaster=Pricing(lambda trial: 1 + 0.01 * (lasts(trial) - 1)), priced=24)
    assert run.tuned == []
    assert tuned.reason == (
        "no other settings of zero2 were tried: the best of 24 is 1.00 times as fast as the start by the forecast,"
        " and a gain counts from 3% on"
    )


def test_settings_are_not_priced_by_time_for_memory(path: Path) -> None:
    tuned = tuning(Journaled(hill), path, forecaster=Pricing(lasts), priced=24, objective="memory")
    assert bucket_of(tuned.best.trial) < 5_000_000  # the fastest is at 40M


def test_without_times_no_setting_is_priced(path: Path) -> None:
    run = Journaled(hill)
    tuning(run, path, priced=24)
    assert len(run.tuned) > 3


def test_the_start_is_told_without_being_run_again(path: Path) -> None:
    run = Journaled(hill)
    tuning(run, path, trials=4)
    assert run.ran[0] == START
    assert len(run.tuned) <= 4
    for trial in run.tuned:
        assert (bucket_of(trial), trial.knobs.settings[OVERLAP]) != (10_000_000, False) or trial.knobs.settings[
            "zero_optimization.contiguous_gradients"
        ] is False
    assert {trial.purpose for trial in run.ran[1:]} <= {"tune", "verify"}


def test_proposals_stay_in_the_rungs_space(path: Path) -> None:
    run = Journaled(hill)
    tuning(run, path, trials=6)
    for trial in run.tuned:
        assert 1_000_000 <= bucket_of(trial) <= 100_000_000
        assert bucket_of(trial) % 2 == 0
        assert trial.knobs.settings["zero_optimization.allgather_bucket_size"] == 10_000_000
        assert set(trial.knobs.settings) == {*KNOBS.settings, *RUNG.tune}
        assert (trial.knobs.micro_batch, trial.steps, trial.repeat) == (4, TIMED, 0)


def test_the_best_leaves_the_headroom(path: Path) -> None:
    run = Journaled(hill)
    tuned = tuning(run, path, headroom=0.35)  # 650 MB are usable: buckets to 18.75M
    assert bucket_of(tuned.best.trial) <= 18_750_000
    assert bucket_of(tuned.best.trial) > 10_000_000 or tuned.best.trial.knobs.settings.get(OVERLAP)


def test_the_search_learns_where_memory_ends(path: Path) -> None:
    run = Journaled(hill)
    tuning(run, path, trials=12)
    ooms = [record for record in run.records.values() if isinstance(record.outcome, OutOfMemory)]
    assert len(ooms) <= 4


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[TuneResult, list[Trial]]:
    """A search that nobody killed, and all that it ran."""
    whole = Journaled(hill)
    return tuning(whole, tmp_path_factory.mktemp("whole") / "study.jsonl", trials=5), whole.ran


@pytest.mark.parametrize("kill_at", [1, 3, 5, 7])  # the first proposal, the GP's first, its last, the confirmation
def test_a_killed_search_resumes_to_the_same_answer(
    undisturbed: tuple[TuneResult, list[Trial]], path: Path, kill_at: int
) -> None:
    run = Journaled(hill)
    for _ in range(2):  # killed again as soon as it has gone on
        run.kill_at = kill_at
        with pytest.raises(KeyboardInterrupt):
            tuning(run, path, trials=5)
    assert (tuning(run, path, trials=5), run.ran) == undisturbed


def test_a_finished_search_runs_nothing_more(path: Path) -> None:
    run = Journaled(hill)
    first = tuning(run, path, trials=3)
    before = len(run.ran)
    assert tuning(run, path, trials=3) == first
    assert len(run.ran) == before


def test_what_a_kill_leaves_in_the_study_file_does_not_matter(path: Path) -> None:
    run = Journaled(hill, kill_at=2)
    with pytest.raises(KeyboardInterrupt):
        tuning(run, path, trials=3)
    path.with_name(path.name + ".lock").touch()  # a dead driver's
    with open(path, "ab") as file:
        file.write(b'{"op_code": 4, "tr')
    tuning(run, path, trials=3)
    assert len(run.tuned) == 3
    assert len(told(path)) == 4


def test_other_seeds_propose_other_settings(tmp_path: Path) -> None:
    first, second = Journaled(hill), Journaled(hill)
    tuning(first, tmp_path / "0", trials=2, seed=0)
    tuning(second, tmp_path / "1", trials=2, seed=100)
    assert first.tuned != second.tuned


def test_the_search_ends_although_everything_runs_out_or_fails(path: Path, tmp_path: Path) -> None:
    for number, outcome in enumerate((out_of_memory(), out_of_memory(tier="host"), failed())):
        run = Journaled(lambda trial, outcome=outcome: hill(trial) if trial == START else outcome)  # type: ignore[misc]
        tuned = tuning(run, tmp_path / f"{number}.jsonl", trials=5)
        assert tuned.best.trial == START
        assert tuned.reason == "5 other settings of zero2 were tried, none was faster"
        assert tuned.importances == {}


def test_the_same_proposal_is_run_once_and_still_counts(path: Path) -> None:
    knobs = replace(KNOBS, settings={})  # only the two switches are left: four points
    run = Journaled(lambda trial: fit(peak_bytes=1, samples_per_second=1.0))
    tuning(run, path, trials=8, start=replace(START, knobs=knobs))
    assert len(run.tuned) <= 3
    assert len({trial_key(trial) for trial in run.tuned}) == len(run.tuned)


def usual_of(path: Path, **options: Any) -> Journaled:
    run = Journaled(hill)
    tuning(run, path, trials=1, **options)
    return run


def test_what_deepspeed_takes_by_itself_is_tried_first(path: Path) -> None:
    (first,) = usual_of(path).tuned
    assert bucket_of(first) == 100_000_000  # of its 500M the space ends here
    assert first.knobs.settings[OVERLAP] is False
    assert first.knobs.settings["zero_optimization.contiguous_gradients"] is True


def test_a_start_that_is_the_usual_is_not_tried_again(path: Path) -> None:
    knobs = replace(KNOBS, settings={BUCKET: 500_000_000})
    run = Journaled(lambda trial: fit(peak_bytes=1, samples_per_second=1.0))
    tuning(run, path, trials=1, start=replace(START, knobs=knobs))
    assert all(trial.knobs.settings != run.ran[0].knobs.settings for trial in run.tuned)
    assert told(path)[1] != told(path)[0]


def test_the_usual_is_not_run_where_it_cannot_fit_by_the_forecast(path: Path) -> None:
    class Foreseeing(Forecaster):
        def forecast(self, trial: Trial) -> RungForecast | None:
            verdict: Verdict = "cannot_fit" if bucket_of(trial) == 100_000_000 else "fits"
            return RungForecast(rung="zero2", verdict=verdict, reason="needs more", micro_batch=4, memory={})

    assert usual_of(path, forecaster=Foreseeing()).tuned == []


def study_at(path: Path) -> optuna.Study:
    """As anybody with Optuna reads it."""
    backend = JournalFileBackend(str(path), lock_obj=JournalFileOpenLock(str(path)))
    storage = JournalStorage(backend)
    (summary,) = storage.get_all_studies()
    return optuna.load_study(study_name=summary.study_name, storage=storage)


def told(path: Path) -> list[dict[str, Any]]:
    return [trial.params for trial in study_at(path).trials]


def flat(trial: Trial) -> Outcome:
    """Half a percent is all there is to gain."""
    return fit(peak_bytes=1, samples_per_second=100 + (bucket_of(trial) > 10_000_000) / 2)


def test_a_search_that_gains_nothing_ends_before_its_trials_are_spent(path: Path) -> None:
    run = Journaled(flat)
    tuned = tuning(run, path, trials=40, sampler=by_chance)
    assert len(told(path)) == STARTUP + WAIT
    assert tuned.best.trial == START
    assert tuned.reason.startswith(f"{len(run.tuned)} other settings of zero2 were tried until ")
    assert f"until {WAIT} in a row had gained less than 1%; " in tuned.reason


def test_a_stop_gain_of_zero_spends_all_trials(path: Path) -> None:
    tuning(Journaled(flat), path, trials=15, stop_gain=0, sampler=by_chance)
    assert len(told(path)) == 16


def test_a_search_that_ended_early_ends_there_again_after_a_kill(tmp_path: Path) -> None:
    whole, run = Journaled(flat), Journaled(flat, kill_at=5)
    undisturbed = tuning(whole, tmp_path / "whole.jsonl", trials=20, sampler=by_chance)
    with pytest.raises(KeyboardInterrupt):
        tuning(run, tmp_path / "killed.jsonl", trials=20, sampler=by_chance)
    assert (tuning(run, tmp_path / "killed.jsonl", trials=20, sampler=by_chance), run.ran) == (undisturbed, whole.ran)


def test_a_spent_budget_still_confirms_the_leaders(path: Path) -> None:
    run = Journaled(lambda trial: fit(peak_bytes=1, samples_per_second=100 if trial.knobs == KNOBS else 150))
    tuned = tuning(run, path, budget=Budget(trials=8))  # the start, the usual settings and two more, five to confirm
    assert len(run.tuned) == 3
    assert tuned.best.trial.knobs != KNOBS
    assert tuned.reason.startswith("3 other settings of zero2 were tried until the budget was spent; measured again")


def test_without_any_budget_the_start_stays(path: Path) -> None:
    run = Journaled(hill)
    tuned = tuning(run, path, budget=Budget(trials=1))
    assert (tuned.best.trial, run.ran) == (START, [START])
    assert tuned.reason == "no other settings of zero2 were tried: the budget was spent"


def test_the_objective_can_be_another_than_samples_per_second(path: Path) -> None:
    tuned = tuning(Journaled(hill), path, objective="memory")
    assert bucket_of(tuned.best.trial) < 5_000_000  # the hill is at 40M
    assert "times as good as the start" in tuned.reason


def test_what_is_told_to_the_study_is_the_objective(path: Path) -> None:
    run = Journaled(flat)
    tuning(run, path, trials=2, objective="memory")
    assert [trial.value for trial in study_at(path).trials] == [memory_score(each) for each in run.records.values()]


def test_whoever_opens_the_study_sees_what_became_of_each_proposal(path: Path) -> None:
    run = Journaled(lambda trial: hill(trial) if trial == START else out_of_memory())
    tuning(run, path, trials=1)
    shown = [trial.user_attrs for trial in study_at(path).trials]
    assert shown == [{"trial": 1, "outcome": "fits"}, {"trial": 2, "outcome": "out of device memory"}]


def test_a_rung_without_a_space_returns_its_start_at_once(path: Path) -> None:
    start = ScriptedRunner(hill).run(replace(START, rung="ddp"))
    tuned = tune(start, tuning_context(lambda trial: pytest.fail("nothing is to be run"), path))
    assert tuned == TuneResult(best=start, importances={}, reason="ddp has nothing to tune")
    assert not path.exists()


def noisy(speeds: Iterator[float]) -> Callable[[Trial], Outcome]:
    return lambda trial: fit(peak_bytes=1, samples_per_second=next(speeds))


def measured(speed: float, settings: dict[str, Scalar]) -> Record:
    trial = replace(START, knobs=replace(KNOBS, settings=settings))
    return Record(id=1, trial=trial, outcome=fit(peak_bytes=1, samples_per_second=speed), seconds=1.0)


def test_leaders_within_the_noise_are_measured_again() -> None:
    start, lucky, steady = measured(100.0, {}), measured(121.0, {OVERLAP: True}), measured(120.0, {OVERLAP: False})
    speeds = {None: 100.0, True: 108.0, False: 118.0}
    runner = ScriptedRunner(
        lambda trial: fit(peak_bytes=1, samples_per_second=speeds[trial.knobs.settings.get(OVERLAP)])  # type: ignore[index]
    )
    best, reason = confirming(start, [lucky, steady], runner.run)
    assert best.trial.knobs == steady.trial.knobs
    assert reason == "measured again in turn, 1.18 times as fast as the start (1.11 to 1.25)"


def test_a_budget_for_one_leader_measures_the_best_alone_again() -> None:
    start, leader, other = measured(100.0, {}), measured(121.0, {OVERLAP: True}), measured(120.0, {OVERLAP: False})
    runner = ScriptedRunner(lambda trial: fit(peak_bytes=1, samples_per_second=100.0))
    confirming(start, [leader, other], runner.run, budget=Budget(trials=5))
    assert [trial.knobs for trial in runner.trials] == [start.trial.knobs, leader.trial.knobs] * 2


def test_a_leader_that_claims_less_than_counts_is_not_measured_again() -> None:
    start, leader, other = measured(100.0, {}), measured(104.0, {OVERLAP: True}), measured(102.0, {OVERLAP: False})
    runner = ScriptedRunner(lambda trial: fit(peak_bytes=1, samples_per_second=100.0))
    confirming(start, [leader, other], runner.run)
    assert [trial.knobs for trial in runner.trials] == [start.trial.knobs, leader.trial.knobs] * 2


def test_a_start_that_was_once_disturbed_promises_no_gain() -> None:
    disturbed, leader = measured(100.0, {}), measured(125.0, {OVERLAP: True})
    runner = ScriptedRunner(lambda trial: fit(peak_bytes=1, samples_per_second=125.0))
    seen = [disturbed, measured(125.0, {}), measured(126.0, {})]
    best, reason = confirming(disturbed, [leader], runner.run, seen=seen)
    assert (best, runner.trials) == (disturbed, [])
    assert reason == "the fastest of them was 1.00 times as fast as the start, less than the 1.03 that counts"


def test_a_start_that_does_not_fit_again_gives_way() -> None:
    start, leader = measured(100.0, {}), measured(120.0, {OVERLAP: True})
    runner = ScriptedRunner(lambda trial: out_of_memory() if trial.knobs == start.trial.knobs else leader.outcome)
    best, reason = confirming(start, [leader], runner.run)
    assert best.trial.knobs == leader.trial.knobs
    assert reason == "the start did not fit, or left no headroom, when it was run again"


def test_the_start_is_kept_when_the_gain_is_noise() -> None:
    start, leader = measured(100.0, {}), measured(110.0, {OVERLAP: True})
    runner = ScriptedRunner(noisy(iter([100.0, 101.0, 101.0, 102.0])))
    best, reason = confirming(start, [leader], runner.run)
    assert best is start
    assert len(runner.trials) == 4
    assert "1.01 times as fast" in reason


def test_a_gain_that_noise_explains_is_not_confirmed() -> None:
    start, leader = measured(100.0, {}), measured(110.0, {OVERLAP: True})
    runner = ScriptedRunner(noisy(iter([100.0, 108.0, 100.0, 103.0])))
    best, reason = confirming(start, [leader], runner.run)
    assert best is start
    assert reason == (
        "the fastest of them was 1.05 times as fast as the start (0.96 to 1.15) when measured again in turn, "
        "which noise explains"
    )


@pytest.mark.parametrize(("budget", "turns"), [(Budget(), 4), (Budget(trials=4), 2)])
def test_a_steady_small_gain_is_confirmed_in_more_turns(budget: Budget, turns: int) -> None:
    start, leader = measured(100.0, {}), measured(106.0, {OVERLAP: True})
    runner = ScriptedRunner(noisy(itertools.cycle([100.0, 106.0])))
    best, _ = confirming(start, [leader], runner.run, turns=4, budget=budget)
    assert len(runner.trials) == 2 * turns
    assert (best.trial.knobs == leader.trial.knobs) is (turns == 4)


def test_of_equal_configs_few_are_confirmed_as_faster() -> None:
    draw = random.Random(1)
    start, leader, confirmed = measured(100.0, {}), measured(110.0, {OVERLAP: True}), 0
    for _ in range(200):
        runner = ScriptedRunner(lambda trial: fit(peak_bytes=1, samples_per_second=draw.gauss(100.0, 5.0)))
        confirmed += confirming(start, [leader], runner.run, turns=4)[0] is not start
    assert confirmed <= 20  # by the ratio of four turns alone: 48


def test_a_gain_below_what_counts_is_not_measured_again() -> None:
    start, leader = measured(100.0, {}), measured(102.0, {OVERLAP: True})
    runner = ScriptedRunner(hill)
    assert confirming(start, [leader], runner.run)[0] is start
    assert runner.trials == []


def test_a_confirmed_leader_has_its_new_measurement() -> None:
    start, leader = measured(100.0, {}), measured(120.0, {OVERLAP: True})
    runner = ScriptedRunner(noisy(iter([100.0, 112.0, 100.0, 110.0])))
    best, _ = confirming(start, [leader], runner.run)
    assert best.trial.knobs == leader.trial.knobs
    assert isinstance(best.outcome, Fit)
    assert best.outcome.samples_per_second == 110.0


def test_a_leader_that_does_not_fit_again_is_dropped() -> None:
    start, leader = measured(100.0, {}), measured(120.0, {OVERLAP: True})
    runner = ScriptedRunner(lambda trial: out_of_memory() if trial.knobs == leader.trial.knobs else start.outcome)
    assert confirming(start, [leader], runner.run)[0] is start


def test_the_space_starts_where_the_config_stands() -> None:
    space = space_of(RUNG, KNOBS.settings, {OVERLAP: True})
    assert space.dimensions[BUCKET] == FloatDistribution(1_000_000, 100_000_000, log=True)
    assert space.dimensions[OVERLAP] == CategoricalDistribution((True, False))
    assert space.start[OVERLAP] is True
    assert space_of(RUNG, {BUCKET: 400_000_000}, {}).dimensions[BUCKET] == FloatDistribution(
        40_000_000, 500_000_000, log=True
    )
    assert BUCKET not in space_of(RUNG, {}, {}).dimensions


def test_reading_the_search_loads_neither_optuna_nor_torch() -> None:
    code = (
        "import sys, autods.tuner.optuna_search, autods.tuner.ladder_walk, autods.tuner.batch_size; print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"optuna", "torch", "ray", "deepspeed"} & set(loaded)


def test_a_search_goes_on_while_it_gains() -> None:
    scores = [100.0 * 1.02**number for number in range(4 * WAIT)]
    assert not any(has_converged(scores[:count], 0.01) for count in range(len(scores) + 1))


def test_it_ends_when_the_last_trials_gained_less_than_asked() -> None:
    scores = [100.0] * (STARTUP - 1) + [120.0] + [120.5] * WAIT
    assert has_converged(scores, 0.01)
    assert not has_converged(scores[:-1], 0.01)
    assert not has_converged(scores, 0.001)


def test_small_gains_add_up() -> None:
    assert not has_converged([100.0] * STARTUP + [100 + 1.5 * number / WAIT for number in range(1, WAIT + 1)], 0.01)


def test_the_first_trials_are_never_held_against_it() -> None:
    assert not any(has_converged([100.0] * count, 0.01) for count in range(STARTUP + WAIT))
    assert has_converged([100.0] * (STARTUP + WAIT), 0.01)


def test_what_does_not_fit_gains_nothing() -> None:
    assert has_converged([100.0] * STARTUP + [None] * WAIT, 0.01)
    assert not has_converged([None] * 3 * WAIT, 0.01)


def test_zero_never_ends_it() -> None:
    assert not has_converged([100.0] * 5 * WAIT, 0.0)
