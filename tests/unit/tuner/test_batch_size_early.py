"""Growing that begins small and ends early, and the exam that its last trial goes on with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from autods.config.profiles import AccumulateLimits, GrowLimits
from autods.journal import key_of
from autods.runner.testing import ScriptedRunner, failed, fit, out_of_memory
from autods.tuner.batch_size import Climb, Rules, last_from_s, most_to_gain
from autods.types import Examined, Fit, Knobs, Outcome, Phase, Record, Steps, Timing, Trial

GIB = 2**30
TIMED = Steps(warmup=1, timed=2, most_timed=2, budget_s=1.2)
LIMITS = GrowLimits(most_trials=3, most_micro_batch=4096, gain=1.03, worth=1.15, first_look=8)
UP_TO_4 = AccumulateLimits(most=4, gain=1.02)
DID = Examined(batch_shape=(8, 128), draws=16, evaluated=True, save_s=0.1, load_s=0.1, restored=True)


@dataclass
class Machine:
    """A micro step takes `fixed_s` and `sample_s` a sample, the optimizer `update_s`, a trial `beside_s` more."""

    fixed_s: float
    sample_s: float
    update_s: float = 0.0
    seen: bool = True  # the optimizer's part, by the trial
    beside_s: float = 0.3
    after: Callable[[Trial], Outcome | None] = lambda trial: None  # what the exam comes to, where it fails
    trials: list[Trial] = field(default_factory=list)

    def run(self, trial: Trial) -> Record:
        self.trials.append(trial)
        step_s = self.step_s(trial.knobs.micro_batch, trial.knobs.accumulation)
        steps_s = (trial.steps.warmup + trial.steps.timed) * step_s
        outcome = self.answer(trial)
        if isinstance(outcome, Fit):
            share = self.update_s / step_s if self.seen else None
            timing = Timing(wall_s=steps_s + self.beside_s, steps_s=steps_s, update_share=share)
            outcome = replace(outcome, timing=timing)
        return Record(id=len(self.trials), trial=trial, outcome=outcome, seconds=steps_s + self.beside_s)

    def answer(self, trial: Trial) -> Outcome:
        size, many = trial.knobs.micro_batch, trial.knobs.accumulation
        step_s = self.step_s(size, many)
        speed = size * many / step_s
        ran = fit(peak_bytes=GIB + size * 2**20, limit_bytes=64 * GIB, step_s=step_s, samples_per_second=speed)
        if trial.examined_from_s is None or step_s < trial.examined_from_s:
            return ran
        return self.after(trial) or replace(ran, examined=DID)

    def step_s(self, size: int, many: int = 1) -> float:
        return many * (self.fixed_s + self.sample_s * size) + self.update_s

    def climb(
        self,
        *,
        limits: GrowLimits = LIMITS,
        examines: bool = True,
        global_batch: int | None = None,
        accumulate: AccumulateLimits | None = None,
    ) -> Climb:
        rules = Rules(
            run=self.run,
            limits=limits,
            steps=TIMED,
            usable_bytes=63 * GIB,
            world_size=1,
            global_batch=global_batch,
            examines=examines,
            accumulate=accumulate,
        )
        first = Trial(rung="ddp", knobs=Knobs(), purpose="walk")
        climb = Climb(rules=rules, first=first, walked=self.run(first))
        climb.ends()
        return climb

    @property
    def batches(self) -> list[tuple[int, int]]:
        """Micro batch and how many a step, of what was grown."""
        return [(trial.knobs.micro_batch, trial.knobs.accumulation) for trial in self.trials[1:]]

    @property
    def sizes(self) -> list[int]:
        """Of what was grown."""
        return [trial.knobs.micro_batch for trial in self.trials[1:]]


def test_where_steps_take_the_time_growing_begins_small_and_ends_where_little_is_left() -> None:
    machine = Machine(fixed_s=0.09, sample_s=0.07)
    climb = machine.climb()
    assert machine.sizes == [8]
    assert climb.stop is not None
    assert not climb.stop.is_limit
    assert climb.stop.reason == "by the steps of micro batch 1 and 8 no larger one can be more than 7% faster in time"


def test_where_a_trial_is_more_than_its_steps_growing_begins_as_large_as_it_may() -> None:
    limits = replace(LIMITS, first_look=2)
    slow_start, quick_start = (Machine(fixed_s=0.09, sample_s=0.07, beside_s=beside_s) for beside_s in (20.0, 0.3))
    slow_start.climb(limits=limits)
    quick_start.climb(limits=limits)
    assert (slow_start.sizes[0], quick_start.sizes[0]) == (8, 2)


def test_a_machine_that_larger_batches_make_faster_is_not_left_early() -> None:
    machine = Machine(fixed_s=0.1, sample_s=0.0001)
    climb = machine.climb()
    assert machine.sizes == [8, 64, 512]
    assert all(record.outcome.kind == "fit" and record.outcome.examined is None for record in climb.records)


def test_what_is_left_is_never_told_before_it_is_measured_unless_the_profile_says_so() -> None:
    machine = Machine(fixed_s=0.09, sample_s=0.07)
    climb = machine.climb(limits=replace(LIMITS, first_look=0))
    assert len(machine.sizes) > 1
    assert {trial.examined_from_s for trial in machine.trials} == {None}
    assert climb.stop is not None


def test_with_a_global_batch_the_seconds_of_a_step_end_nothing() -> None:
    machine = Machine(fixed_s=0.09, sample_s=0.07)
    machine.climb(global_batch=16)
    assert {trial.examined_from_s for trial in machine.trials} == {None}
    assert 16 in machine.sizes


def test_the_last_trial_has_its_exam_and_no_trial_before_it() -> None:
    machine = Machine(fixed_s=0.3, sample_s=0.02)
    climb = machine.climb()
    examined = [isinstance(one.outcome, Fit) and one.outcome.examined is not None for one in climb.records]
    assert len(examined) > 1
    assert examined == [False] * (len(examined) - 1) + [True]


def test_an_optimizer_that_takes_its_share_of_a_step_is_shared_in_the_first_look_already() -> None:
    machine = Machine(fixed_s=0.04, sample_s=0.03, update_s=0.02)
    climb = machine.climb(accumulate=UP_TO_4)
    assert machine.batches == [(8, 4)]
    assert climb.stop is not None
    assert "no larger one can be more than" in climb.stop.reason
    outcome = climb.records[-1].outcome
    assert isinstance(outcome, Fit)
    assert outcome.examined == DID


@pytest.mark.parametrize(("update_s", "seen"), [(0.002, True), (0.02, False)])
def test_an_optimizer_that_takes_little_or_was_not_seen_is_no_reason_for_longer_steps(
    update_s: float, seen: bool
) -> None:
    machine = Machine(fixed_s=0.04, sample_s=0.03, update_s=update_s, seen=seen)
    machine.climb(accumulate=UP_TO_4)
    assert {many for _, many in machine.batches} == {1}


def test_a_larger_micro_batch_takes_fewer_of_them_a_step_where_a_step_would_take_too_long() -> None:
    machine = Machine(fixed_s=0.06, sample_s=0.012, update_s=0.02)
    machine.climb(accumulate=replace(UP_TO_4, gain=1.01))
    assert machine.batches[0] == (8, 4)
    assert machine.batches[1][0] > 8
    assert machine.batches[1][1] == 2
    assert all(many * machine.step_s(size) <= 2 * TIMED.budget_s for size, many in machine.batches if many > 1)


def test_whether_it_was_examined_is_no_part_of_the_config_that_is_passed_on() -> None:
    machine = Machine(fixed_s=0.09, sample_s=0.07)
    best = machine.climb().best()
    assert best is not None
    assert machine.trials[-1].examined_from_s is not None
    assert best.trial == replace(machine.trials[-1], examined_from_s=None)


@pytest.mark.parametrize("phase", ["evaluate", "save", "load"])
def test_what_fails_after_the_steps_is_timed_alone(phase: Phase) -> None:
    def after(trial: Trial) -> Outcome:
        return replace(failed(failure="user_code", action="fix_code"), phase=phase)

    machine = Machine(fixed_s=0.09, sample_s=0.07, after=after)
    climb = machine.climb()
    assert machine.sizes == [8, 8]
    assert [record.outcome.kind for record in climb.records] == ["fit"]
    assert machine.trials[-1].examined_from_s is None


def test_memory_that_runs_out_in_the_steps_is_that_of_the_timed_batch() -> None:
    machine = Machine(fixed_s=0.09, sample_s=0.07)
    runner = ScriptedRunner(lambda trial: out_of_memory() if trial.knobs.micro_batch > 7 else machine.answer(trial))
    first = Trial(rung="ddp", knobs=Knobs(), purpose="walk")
    rules = Rules(
        run=runner.run, limits=replace(LIMITS, most_trials=8), steps=TIMED, usable_bytes=63 * GIB, world_size=1,
        global_batch=None, examines=True,
    )  # fmt: skip
    climb = Climb(rules=rules, first=first, walked=runner.run(first))
    climb.ends()
    assert climb.ground.bad is not None
    best = climb.best()
    assert best is not None
    assert best.trial.knobs.micro_batch <= 7


@pytest.mark.parametrize("size", [2, 8, 15, 64])
@pytest.mark.parametrize("worth", [1.02, 1.15, 1.5])
def test_the_step_that_ends_a_climb_is_known_before_it_is_run(size: int, worth: float) -> None:
    from_s = last_from_s({1: 0.1}, size, 1.2, worth)
    assert from_s is not None
    assert most_to_gain(1, 0.1, size, from_s * 1.001, 1.2) < worth
    assert from_s * 0.999 <= 0.1 or most_to_gain(1, 0.1, size, from_s * 0.999, 1.2) >= worth


def test_a_smaller_batch_than_one_that_was_measured_is_never_said_to_be_the_last() -> None:
    assert last_from_s({1: 0.1, 16: 1.0}, 8, 1.2, 1.15) is None


def test_steps_that_do_not_become_longer_promise_everything() -> None:
    assert most_to_gain(1, 0.2, 8, 0.2, 1.2) == float("inf")


def test_the_journals_of_fits_without_this_keep_their_keys() -> None:
    trial = Trial(rung="ddp", knobs=Knobs(), purpose="grow")
    assert "examined_from_s" not in key_of(trial)
    assert key_of(replace(trial, examined_from_s=0.5)) != key_of(trial)
