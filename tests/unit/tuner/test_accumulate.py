"""More micro batches a step, where the user left open how many samples a step has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from autods.config.profiles import AccumulateLimits
from autods.runner.testing import fit, out_of_memory
from autods.tuner.accumulate import Accumulated, accumulate
from autods.tuner.forecasts import BLIND
from autods.tuner.trials import samples_per_second
from autods.types import Knobs, Outcome, Record, Steps, Timing, Trial

GIB = 2**30
STEPS = Steps(warmup=1, timed=2, most_timed=2, budget_s=1.2)


@dataclass
class Machine:
    """A micro batch takes `micro_s`, the optimizer `update_s`; what was timed later ran at `later` times the speed."""

    micro_s: float = 0.37
    update_s: float = 0.03
    beside_s: float = 0.5
    seen: bool = True  # the optimizer's share, by the trial
    later: float = 1.0
    ends: Callable[[Trial], Outcome | None] = lambda trial: None
    trials: list[Trial] = field(default_factory=list)

    def run(self, trial: Trial) -> Record:
        step_s = trial.knobs.accumulation * self.micro_s + self.update_s
        speed = self.later if self.trials else 1.0
        self.trials.append(trial)
        steps_s = 3 * step_s
        ran = replace(
            fit(
                peak_bytes=GIB,
                limit_bytes=64 * GIB,
                step_s=step_s / speed,
                samples_per_second=speed * trial.knobs.train_batch(1) / step_s,
            ),
            timing=Timing(
                wall_s=steps_s + self.beside_s,
                steps_s=steps_s,
                update_share=self.update_s / step_s if self.seen else None,
            ),
        )
        return Record(
            id=len(self.trials), trial=trial, outcome=self.ends(trial) or ran, seconds=steps_s + self.beside_s
        )

    def accumulated(
        self,
        *,
        most: int = 4,
        gain: float = 1.02,
        world_size: int = 1,
        start: Record | None = None,
    ) -> Accumulated:
        start = start or self.run(Trial(rung="ddp", knobs=Knobs(micro_batch=8), purpose="grow", steps=STEPS))
        return accumulate(
            start,
            self.run,
            limits=AccumulateLimits(most=most, gain=gain),
            steps=STEPS,
            world_size=world_size,
            noise=0.1,
            usable_bytes=63 * GIB,
            foresight=BLIND,
            score=samples_per_second,
        )

    @property
    def tried(self) -> list[int]:
        """Micro batches a step."""
        return [trial.knobs.accumulation for trial in self.trials[1:]]


def test_an_optimizer_that_takes_its_share_of_a_step_is_shared_by_more_micro_batches() -> None:
    machine = Machine()
    said = machine.accumulated()
    assert machine.tried == [4]
    assert said.best.trial.knobs == Knobs(micro_batch=8, accumulation=4)
    assert said.reason is not None
    assert "1.06 times as fast as one" in said.reason


@pytest.mark.parametrize(("later", "taken"), [(0.92, 4), (0.7, 1)])
def test_a_busy_machine_does_not_outweigh_what_the_trial_saw_of_the_optimizer(later: float, taken: int) -> None:
    said = Machine(later=later).accumulated()
    assert said.best.trial.knobs.accumulation == taken


def test_where_the_optimizer_takes_next_to_nothing_no_trial_is_spent() -> None:
    machine = Machine(update_s=0.003)
    said = machine.accumulated()
    assert machine.tried == []
    assert said.reason == "4 micro batches a step would be 1.01 times as fast as one"


def test_between_ranks_a_small_optimizer_is_no_reason_not_to_try() -> None:
    machine = Machine(update_s=0.003)
    machine.accumulated(world_size=2)
    assert machine.tried == [4]


@pytest.mark.parametrize(("update_s", "taken"), [(0.1, 4), (0.003, 1)])
def test_what_no_trial_could_see_is_decided_by_what_was_measured(update_s: float, taken: int) -> None:
    machine = Machine(update_s=update_s, seen=False)
    said = machine.accumulated()
    assert machine.tried == [4]
    assert said.best.trial.knobs.accumulation == taken


def test_a_step_takes_no_longer_than_timing_may() -> None:
    machine = Machine(micro_s=0.8, update_s=0.1)
    machine.accumulated()
    assert machine.tried == [2]


@pytest.mark.parametrize(("most", "beside_s"), [(1, 0.5), (4, 30.0)])
def test_nothing_is_tried_where_it_is_not_wanted_or_a_trial_is_mostly_its_start(most: int, beside_s: float) -> None:
    machine = Machine(beside_s=beside_s)
    said = machine.accumulated(most=most)
    assert machine.tried == []
    assert said.reason is None


def test_what_runs_out_of_memory_leaves_the_start() -> None:
    machine = Machine(ends=lambda trial: out_of_memory() if trial.knobs.accumulation > 1 else None)
    said = machine.accumulated()
    assert said.best.trial.knobs.accumulation == 1
    assert said.reason == "4 micro batches a step do not fit with the headroom"


def test_what_grew_with_several_micro_batches_a_step_keeps_them_and_says_why() -> None:
    machine = Machine()
    grown = machine.run(Trial(rung="ddp", knobs=Knobs(micro_batch=8, accumulation=4), purpose="grow", steps=STEPS))
    said = machine.accumulated(start=grown)
    assert said.best == grown
    assert said.reason == "4 micro batches a step share the optimizer's part, which is 7.5% of a step of one"
