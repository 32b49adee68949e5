"""The number of steps that a trial times, and micro batches whose steps are too long."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from autods.config.profiles import GrowLimits
from autods.runner.testing import ScriptedRunner, fit, out_of_memory
from autods.tuner.batch_curve import BatchCurve
from autods.tuner.batch_size import Growth
from autods.tuner.trials import fit_steps_to_budget, fits_within
from autods.types import CardUse, Fit, Knobs, Outcome, OutOfMemory, Record, Steps, Trial
from tests.support.contexts import ScriptedTrials, make_context
from tests.support.walks import FITS

GIB = 2**30
TIMED = Steps(warmup=2, timed=3, most_timed=12, budget_s=8.0)
LIMITS = GrowLimits(most_trials=8, most_micro_batch=4096, gain=1.0)


def test_short_steps_are_timed_as_often_as_the_profile_says() -> None:
    assert fit_steps_to_budget(TIMED, 1.6) == TIMED
    assert fit_steps_to_budget(TIMED, 0.0) == TIMED  # nothing is known of them


@pytest.mark.parametrize(("step_s", "warmup", "timed"), [(1.7, 1, 3), (2.5, 1, 2), (4.0, 1, 1), (100.0, 1, 1)])
def test_of_long_steps_as_many_are_run_as_the_budget_has_room_for(step_s: float, warmup: int, timed: int) -> None:
    said = fit_steps_to_budget(TIMED, step_s)
    assert (said.warmup, said.timed, said.most_timed) == (warmup, timed, 12)


def test_a_fixed_number_of_steps_keeps_its_minimum() -> None:
    exam = Steps(warmup=0, timed=6, most_timed=6, budget_s=20.0)
    said = fit_steps_to_budget(exam, 7.0, least=4)
    assert (said.warmup, said.timed, said.most_timed) == (0, 4, 4)
    assert fit_steps_to_budget(exam, 3.0) == exam


@pytest.mark.parametrize(("in_use", "retries", "fits"), [(900, 0, True), (900, 1, False), (960, 0, False)])
def test_cached_memory_leaves_the_headroom_but_retries_do_not(in_use: int, retries: int, fits: bool) -> None:
    card = CardUse(allocated_bytes=800, reserved_bytes=900, nvml_bytes=990, in_use_bytes=in_use)
    ran = replace(fit(peak_bytes=990, limit_bytes=1000, alloc_retries=retries), card=card)
    trial = Trial(rung="zero2", knobs=Knobs(), purpose="grow")
    assert fits_within(Record(id=1, trial=trial, outcome=ran, seconds=1.0), usable_bytes=950) is fits


class Model:
    """Steps that cost a second and a quarter of one for each sample."""

    def __init__(self) -> None:
        self.runner = ScriptedRunner(self.answer)

    def answer(self, trial: Trial) -> Outcome:
        size = trial.knobs.micro_batch
        step_s = self.step_s(size)
        return fit(peak_bytes=GIB, limit_bytes=64 * GIB, step_s=step_s, samples_per_second=size / step_s)

    @staticmethod
    def step_s(size: int) -> float:
        return 1.0 + size / 4

    def growth(self, rung: str, *, like: tuple[Record, ...] = (), most_trials: int = 8) -> Growth:
        context = make_context(self.runner.run, profile={"grow": LIMITS}, headroom=0.0, device_bytes=63 * GIB, gpus=1)
        first = Trial(rung=rung, knobs=Knobs(), purpose="walk")
        return Growth(context=context, first=first, like=like, most_trials=most_trials, steps=TIMED)


def test_a_rivals_longest_step_counts_other_configs() -> None:
    model = Model()
    leader = model.growth("ddp")
    leader.walked = model.runner.run(leader.first)
    leader.run()
    assert max(trial.knobs.micro_batch for trial in model.runner.trials) <= 28  # a step of 8 seconds
    rival = model.growth("zero1", like=leader.all_records)
    rival.measure(24)
    assert rival.longest_step_s == TIMED.budget_s
    alone = model.growth("zero1")
    alone.measure(24)
    assert alone.longest_step_s == 4 * model.step_s(24)  # its own large batch is all that it knows of


def test_a_rivals_first_trial_is_as_short_as_its_steps_are_long() -> None:
    model = Model()
    leader = model.growth("ddp")
    leader.walked = model.runner.run(leader.first)
    leader.measure(24)
    rival = model.growth("zero1", like=leader.all_records)
    trial = rival.measure(24).trial
    assert (trial.steps.warmup, trial.steps.timed) == (1, 2)
    assert leader.records[0].trial.steps.timed <= 2


def test_a_slightly_larger_batch_is_not_worth_a_long_step() -> None:
    model = Model()
    growth = model.growth("ddp")
    growth.walked = model.runner.run(growth.first)
    growth.run()
    sizes = [record.trial.knobs.micro_batch for record in growth.records]
    assert all(larger >= 1.15 * smaller for smaller, larger in pairwise(sizes))
    assert len(sizes) <= 4


LIMIT = 1000
TRIAL = Trial(rung="zero3", knobs=Knobs(micro_batch=4), purpose="grow")


def on_card(in_use: int, allocated: int, retries: int = 0) -> Fit:
    """A fit of which 50 bytes lie beside the allocator, which has reserved all that it used."""
    card = CardUse(allocated_bytes=allocated - 50, reserved_bytes=in_use - 50, in_use_bytes=in_use)
    return replace(fit(peak_bytes=in_use, alloc_retries=retries), card=card)


@pytest.mark.parametrize(
    ("whole", "kept", "limits", "fits"),
    [
        (on_card(940, 900), FITS, [False], True),
        (on_card(1000, 900, retries=2), on_card(950, 900, retries=3), [False, True], True),
        (on_card(960, 900), on_card(950, 900, retries=1), [False, True], True),  # weights that came back late
        (on_card(960, 960), FITS, [False], False),  # its tensors need the headroom
        (on_card(1000, 900, retries=2), out_of_memory(), [False, True], False),
    ],
    ids=["headroom left", "ran full", "used late", "needed", "in pieces"],
)
def test_what_used_the_headroom_without_need_runs_without_it(
    whole: Fit, kept: Outcome, limits: list[bool], fits: bool
) -> None:
    runner = ScriptedRunner(lambda trial: kept if trial.knobs.keeps_headroom else whole)
    context = make_context(runner.run, device_bytes=LIMIT)
    record = context.run(TRIAL)
    assert [trial.knobs.keeps_headroom for trial in runner.trials] == limits
    assert isinstance(record.outcome, Fit)
    assert context.fits(record) is fits
    assert context.run(replace(TRIAL, repeat=1)).trial.knobs.keeps_headroom is (fits and len(limits) > 1)


def test_bytes_beside_the_allocator_may_grow_a_little() -> None:
    knobs = Knobs(keeps_headroom=True)
    grown = fit(peak_bytes=GIB + 2**20, alloc_retries=4)
    assert grown.leaves_headroom(GIB, knobs)
    assert not grown.leaves_headroom(GIB, Knobs())
    assert not replace(grown, memory=fit(peak_bytes=2 * GIB).memory).leaves_headroom(GIB, knobs)
    curve = BatchCurve.from_records([Record(id=1, trial=replace(TRIAL, knobs=knobs), outcome=grown, seconds=1.0)], GIB)
    assert (curve.fits, curve.peak_bytes[1]) == (1, GIB)


def test_the_smallest_batch_that_lacks_the_headroom_gets_it() -> None:
    learned: list[Outcome] = []

    class Keeps(ScriptedTrials):
        """Keeps a trial out of the headroom, as a forecast has it, until one lacked memory so."""

        def run(self, trial: Trial) -> Record:
            keeps = trial.knobs.keeps_headroom or not learned
            record = super().run(replace(trial, knobs=replace(trial.knobs, keeps_headroom=keeps)))
            learned.extend([record.outcome] if isinstance(record.outcome, OutOfMemory) else [])
            return record

    runner = ScriptedRunner(lambda trial: out_of_memory() if trial.knobs.keeps_headroom else on_card(1000, 960))
    context = replace(make_context(runner.run, device_bytes=LIMIT), memory=Keeps(runner.run))  # type: ignore[arg-type]
    assert isinstance(context.run(replace(TRIAL, knobs=Knobs(micro_batch=1))).outcome, Fit)
    learned.clear()
    assert isinstance(context.run(TRIAL).outcome, OutOfMemory)  # a smaller one may do
