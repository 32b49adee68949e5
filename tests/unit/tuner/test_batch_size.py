"""Growth of the micro batch: its size, the number of trials, and the reason to stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count, pairwise

import pytest

from autods.config.profiles import GrowLimits
from autods.runner.testing import ScriptedRunner, failed, fit, out_of_memory, surface
from autods.tuner.batch_size import Growth, GrowthEnd
from autods.types import Fit, Knobs, Outcome, OutOfMemory, Record, Steps, Trial
from tests.support.contexts import make_context
from tests.support.walks import SETTINGS

MIB = 2**20
TIMED = Steps(warmup=2, timed=3, most_timed=12, budget_s=1e9)
LIMITS = GrowLimits(most_trials=8, most_micro_batch=4096, gain=1.03)
WALKED = Trial(rung="zero2", knobs=Knobs(settings={"zero_optimization.reduce_bucket_size": 1000}), purpose="walk")


@dataclass
class Grown:
    """A finished growth and what it cost, micro batch 1 of the walk not counted."""

    growth: Growth
    trials: list[Trial]

    @property
    def sizes(self) -> list[int]:
        return [trial.knobs.micro_batch for trial in self.trials]

    @property
    def ooms(self) -> int:
        return sum(isinstance(record.outcome, OutOfMemory) for record in self.growth.records)

    @property
    def best(self) -> Record:
        best = self.growth.best()
        assert best is not None
        return best

    @property
    def largest(self) -> int:
        return self.growth.curve.fits

    @property
    def is_limit(self) -> bool:
        assert self.growth.stop is not None
        return self.growth.stop.is_limit

    @property
    def reason(self) -> str:
        assert self.growth.stop is not None
        return self.growth.stop.reason


def growing(
    answer: Callable[[Trial], Outcome],
    *,
    limit: int,
    global_batch: int | None = None,
    limits: GrowLimits = LIMITS,
    steps: Steps = TIMED,
    headroom: float = 0.05,
    least: int = 1,
    accumulation: int = 1,
) -> Grown:
    runner = ScriptedRunner(answer)
    walked = replace(WALKED, knobs=replace(WALKED.knobs, micro_batch=least, accumulation=accumulation))
    winner = runner.run(walked)
    context = make_context(
        runner.run, profile={"grow": limits}, headroom=headroom, device_bytes=limit, global_batch=global_batch,
        base={**SETTINGS.base, "gradient_accumulation_steps": accumulation},
    )  # fmt: skip
    context = replace(context, least_micro_batch=least)
    growth = Growth(context=context, first=walked, walked=winner, most_trials=limits.most_trials, steps=steps)
    return Grown(growth.run(), runner.trials[1:])


def steep(limit: int, state: int = 100 * MIB, sample: int = 10 * MIB, floor: int = 0) -> Callable[[Trial], Outcome]:
    """A surface whose throughput never saturates: only memory ends the growth."""
    return surface(
        limit_bytes=limit,
        state_bytes=state,
        sample_bytes=sample,
        floor_bytes=floor,
        step_overhead_s=1000.0,
        sample_s=0.001,
    )


LARGEST = [1, 2, 3, 5, 8, 13, 16, 17, 31, 64, 100, 257, 1000]


@pytest.mark.parametrize("largest", LARGEST)
def test_growth_finds_the_largest_micro_batch_in_few_trials(largest: int) -> None:
    limit = int((100 * MIB + (largest + 0.5) * 10 * MIB) / 0.95)
    growth = growing(steep(limit), limit=limit)
    assert growth.largest <= largest
    assert growth.largest >= largest * 15 / 16
    assert growth.is_limit
    assert growth.best.trial.knobs.micro_batch == growth.largest
    assert len(growth.trials) <= 6
    assert growth.ooms <= 1


@pytest.mark.parametrize("largest", LARGEST[2:])
@pytest.mark.parametrize("bend", [1.5, 4.0, 12.0])
def test_growth_survives_a_knee_in_the_memory_line(largest: int, bend: float) -> None:
    limit = int((100 * MIB + (largest + 0.5) * 10 * MIB) / 0.95)
    floor = min(int(100 * MIB + bend * 10 * MIB), int(limit * 0.8))
    growth = growing(steep(limit, floor=floor), limit=limit)
    assert largest * 15 / 16 <= growth.largest <= largest
    assert growth.ooms <= 2
    assert len(growth.trials) <= LIMITS.most_trials


def test_growth_never_jumps_far_beyond_what_was_measured() -> None:
    growth = growing(steep(2**40), limit=2**40)
    fitted = [1, *growth.sizes]
    assert all(after <= 8 * before for before, after in pairwise(fitted))
    assert growth.largest == LIMITS.most_micro_batch
    assert not growth.is_limit


@pytest.mark.parametrize("global_batch", [2, 6, 34, 64, 96, 120])
def test_growth_keeps_the_global_batch(global_batch: int) -> None:
    limit = 400 * MIB
    growth = growing(steep(limit), limit=limit, global_batch=global_batch)
    assert growth.trials
    assert {trial.knobs.train_batch(2) for trial in growth.trials} == {global_batch}
    assert growth.best.trial.knobs.train_batch(2) == global_batch


def test_growth_takes_the_largest_divisor_that_fits() -> None:
    limit = int((100 + 20.5 * 10) * MIB / 0.95)  # 20 samples fit; 48 = 16 × 3 is the share of a rank
    growth = growing(steep(limit), limit=limit, global_batch=96)
    assert growth.largest == 16
    assert growth.best.trial.knobs.accumulation == 3


def test_the_whole_share_of_the_global_batch_ends_the_growth() -> None:
    growth = growing(steep(2**40), limit=2**40, global_batch=16)
    assert growth.largest == 8
    assert not growth.is_limit
    assert "whole share of the global batch" in growth.reason


def test_growth_stops_when_throughput_saturates() -> None:
    limit = 2**40
    answer = surface(limit_bytes=limit, state_bytes=MIB, sample_bytes=MIB, step_overhead_s=0.01, sample_s=0.01)
    growth = growing(answer, limit=limit)
    assert not growth.is_limit
    assert "times as fast" in growth.reason
    assert "memory would allow about 4096" in growth.reason
    assert len(growth.trials) <= 4


def test_a_micro_batch_that_does_not_leave_the_headroom_is_not_chosen() -> None:
    limit = (100 + 2 * 10) * MIB  # 2 fit, without any headroom
    growth = growing(steep(limit), limit=limit)
    assert growth.sizes == [2, 1]
    assert growth.largest == 1
    assert growth.best.trial.knobs.micro_batch == 1
    assert growth.best.trial.purpose == "grow"
    assert "does not leave the headroom" in growth.reason


def test_micro_batch_one_is_timed_when_memory_is_full_already() -> None:
    limit = 110 * MIB
    growth = growing(steep(limit), limit=limit)
    assert growth.sizes == [1]
    assert growth.best.trial.steps == TIMED
    assert growth.is_limit
    assert "micro batch 1 already needs 110.0 MiB, which does not leave the headroom" in growth.reason


def test_the_smallest_trainable_size_need_not_leave_the_headroom() -> None:
    growth = growing(steep(121 * MIB), limit=121 * MIB, least=2)
    assert growth.sizes == [2]
    assert growth.best.trial.knobs.micro_batch == 2
    assert growth.reason.startswith("micro batch 2 already needs 120.0 MiB")


def test_a_failure_caps_the_micro_batch_and_is_told() -> None:
    limit = 2**40

    def answer(trial: Trial) -> Outcome:
        if trial.knobs.micro_batch > 40:
            return failed(evidence="RuntimeError: integer out of range\nmore", action="fix_code")
        return steep(limit)(trial)

    growth = growing(answer, limit=limit)
    assert 36 <= growth.largest <= 40
    assert "integer out of range" in growth.reason
    assert "caps the micro batch only" in growth.reason


def test_a_fluke_does_not_cap_the_micro_batch() -> None:
    limit = 2**40
    flaky = iter([True])

    def answer(trial: Trial) -> Outcome:
        if trial.knobs.micro_batch == 64 and next(flaky, False):
            return failed()
        return steep(limit)(trial)

    assert growing(answer, limit=limit).largest == 4096


@pytest.mark.parametrize(("accumulation", "least", "most"), [(1, 30, 80), (2, 30, 66)])
def test_growth_does_not_start_a_trial_that_would_take_too_long(accumulation: int, least: int, most: int) -> None:
    limit = 2**40
    answer = surface(limit_bytes=limit, state_bytes=MIB, sample_bytes=MIB, step_overhead_s=2.0, sample_s=0.1)
    growth = growing(answer, limit=limit, steps=Steps(budget_s=10.0), accumulation=accumulation)
    assert (
        least <= growth.largest <= most
    )  # 80 samples take 10 s; four times the shortest step of two micro batches are 17 s
    assert not growth.is_limit
    assert "would take about" in growth.reason


def test_a_model_whose_every_step_is_long_grows_all_the_same() -> None:
    """Its optimizer on the CPU takes 8 s a step: with more samples a step it is the same 8 s."""
    limit = 2**40
    answer = surface(limit_bytes=limit, state_bytes=MIB, sample_bytes=MIB, step_overhead_s=8.0, sample_s=0.5)
    growth = growing(answer, limit=limit, steps=Steps(budget_s=1.2))
    assert 26 <= growth.largest <= 52  # four times as long as with one sample
    assert "would take about" in growth.reason


def test_growth_spends_no_more_trials_than_it_may() -> None:
    limit = 2**40
    growth = growing(steep(limit), limit=limit, limits=GrowLimits(most_trials=2, most_micro_batch=4096, gain=1.03))
    assert growth.sizes == [8, 64]
    assert growth.reason == "all 2 trials are spent: micro batch 64 fits, and no larger one was tried"


def test_sizes_below_one_that_is_too_large_cost_growth_no_trials() -> None:
    limit = int(385 * MIB / 0.95)  # the peak is flat up to 12 samples and rises by 7 MiB a sample from there
    limits = GrowLimits(most_trials=3, most_micro_batch=4096, gain=1.03)
    growth = growing(steep(limit, state=300 * MIB, sample=7 * MIB, floor=380 * MIB), limit=limit, limits=limits)
    assert growth.sizes[:3] == [2, 8, 32]
    assert growth.largest == 12
    assert growth.is_limit


def slowed(limit: int, by: Callable[[int], float]) -> Callable[[Trial], Outcome]:
    """A surface that gains throughput up to thousands of samples; other work slows down the nth trial."""
    answer = surface(limit_bytes=limit, state_bytes=MIB, sample_bytes=MIB, step_overhead_s=8.0, sample_s=0.01)
    numbers = count()

    def answer_slowly(trial: Trial) -> Outcome:
        fit, factor = answer(trial), by(next(numbers))
        assert isinstance(fit, Fit)
        rate = fit.samples_per_second / factor
        return replace(fit, samples_per_second=rate, step_s=tuple(factor * seconds for seconds in fit.step_s))

    return answer_slowly


def test_growth_measures_a_size_again_that_seems_slow() -> None:
    growth = growing(slowed(2**40, lambda number: 20.0 if number == 2 else 1.0), limit=2**40)
    assert growth.sizes[:4] == [8, 64, 64, 512]
    assert growth.best.trial.knobs.micro_batch == 4096


def test_growth_goes_on_where_repeats_differ() -> None:
    growth = growing(slowed(2**40, lambda number: 1.0 if number < 2 else 20.0), limit=2**40)
    assert growth.sizes[:5] == [8, 64, 64, 8, 512]  # twice at 64 it was slower than once at 8: so is 8 by now
    assert growth.largest == 4096


def test_growth_keeps_the_global_batch_after_a_failed_timing() -> None:
    limit = 110 * MIB

    def answer(trial: Trial) -> Outcome:
        return steep(limit)(trial) if trial.purpose == "walk" else failed()

    growth = growing(answer, limit=limit, global_batch=16)
    assert growth.best.trial.knobs.train_batch(2) == 16


def test_a_size_that_ran_out_when_repeated_tells_that() -> None:
    def answer(trial: Trial) -> Outcome:
        return out_of_memory() if trial.repeat else fit(peak_bytes=MIB, samples_per_second=trial.knobs.micro_batch)

    runner = ScriptedRunner(answer)
    growth = Growth(
        context=make_context(runner.run), first=WALKED, walked=runner.run(WALKED), most_trials=8, steps=TIMED
    )
    growth.measure(2)
    growth.measure(2)
    assert growth.explain_end(0.0) == GrowthEnd(
        is_limit=True, reason="micro batch 2 ran out of device memory in forward"
    )
