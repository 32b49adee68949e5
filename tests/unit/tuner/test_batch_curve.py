"""The curve of a config: its bound on throughput, its step times, and the cost of a sample."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

import pytest

from autods.runner.testing import fit, out_of_memory
from autods.tuner.batch_curve import BatchCurve, ThroughputBound, least_sample_s
from autods.types import Knobs, Outcome, Record, Trial

CLOSE = 1.05  # sizes closer than twofold are not told apart; what lies between them may be this much faster
SURE = 0.85  # what is taken of a slope: another rung, or another measurement, may show less
DEEPEST = 1.25  # a sample behind the cliff costs at most so much more


def drawn(seed: int) -> tuple[Callable[[float], float], Sequence[int], float, float]:
    """A config's seconds by micro batch: a fixed part and one per sample, dearer beyond a cliff. The sizes that were
    measured, the most that may be, and what is known of a sample's least cost."""
    draw = random.Random(seed)
    fixed, sample = draw.choice((0.0, math.exp(draw.uniform(-3, 4)))), math.exp(draw.uniform(-4, 1))
    sizes = sorted(draw.sample(range(1, 129), draw.randint(1, 5)))
    cliff, dearer = draw.uniform(sizes[0], 200), draw.uniform(1, DEEPEST)
    most = draw.choice((sizes[-1], draw.randint(sizes[-1], 256)))
    least = draw.choice((0.0, 0.6, 1.0)) * sample

    def seconds(size: float) -> float:
        return fixed + sample * (min(size, cliff) + dearer * max(0.0, size - cliff))

    return seconds, sizes, most, least


def bound(times: Mapping[int, float], *, most: float, sample_s: float) -> ThroughputBound:
    return BatchCurve(micro_step_s=times).throughput_bound(most, sample_s)


def rates(seconds: Callable[[float], float], sizes: Sequence[int]) -> dict[int, float]:
    return {size: size / seconds(size) for size in sizes}


@pytest.mark.parametrize("first", range(0, 2000, 500))
def test_no_larger_micro_batch_exceeds_the_bound(first: int) -> None:
    for seed in range(first, first + 500):
        seconds, sizes, most, least = drawn(seed)
        promised = bound({size: seconds(size) for size in sizes}, most=most, sample_s=least)
        reached = max(rates(seconds, range(max(sizes), int(most) + 1)).values())
        assert promised.rate * CLOSE >= reached, (seed, sizes, promised, reached)


def test_the_bound_is_at_least_the_measured_rate() -> None:
    draw = random.Random(0)
    for _ in range(500):  # noisy seconds need not be convex
        times = {size: draw.uniform(0.1, 1.0) * size for size in draw.sample(range(1, 65), 4)}
        promised = bound(times, most=draw.randint(64, 128), sample_s=0.05)
        assert promised.rate >= max(size / seconds for size, seconds in times.items())


def test_more_memory_never_lowers_the_bound() -> None:
    for seed in range(300):
        seconds, sizes, most, least = drawn(seed)
        times = {size: seconds(size) for size in sizes}
        little, some, much = (bound(times, most=room, sample_s=least).rate for room in (sizes[-1], most, 2 * most))
        assert little <= some * (1 + 1e-9) <= much * (1 + 2e-9)


def test_part_of_a_sample_is_no_larger_size() -> None:
    assert bound({3: 0.4, 4: 0.5}, most=4.9, sample_s=0.05) == ThroughputBound(rate=8.0)


def test_only_new_sizes_up_to_the_limit_are_proposed() -> None:
    for seed in range(1000):
        seconds, sizes, most, least = drawn(seed)
        size = bound({one: seconds(one) for one in sizes}, most=most, sample_s=least).size
        assert size is None or (1 <= size <= most and size not in sizes), (seed, sizes, most, size)


def test_without_measurements_the_bound_is_infinite() -> None:
    assert bound({}, most=8, sample_s=1.0).rate == math.inf


def test_at_its_limit_the_bound_is_the_measured_rate() -> None:
    assert bound({1: 2.0, 2: 3.0}, most=2, sample_s=0.5).rate == 2 / 3
    assert bound({1: 2.0, 2: 3.0}, most=2, sample_s=0.5).size is None


def test_the_largest_is_proposed_where_larger_means_faster() -> None:
    promised = bound({1: 11.0}, most=50, sample_s=0.9)
    assert promised.size == 50
    assert promised.rate == pytest.approx(50 / (11.0 + 49 * 0.9 * SURE))


def test_without_a_limit_the_cost_of_a_sample_bounds_the_rate() -> None:
    assert bound({1: 11.0}, most=math.inf, sample_s=0.5).rate == pytest.approx(2.0 / SURE)
    assert bound({1: 11.0}, most=math.inf, sample_s=0.0).rate == math.inf


def record(size: int, outcome: Outcome, accumulation: int = 1) -> Record:
    knobs = Knobs(micro_batch=size, accumulation=accumulation)
    return Record(id=1, trial=Trial(rung="zero2", knobs=knobs, purpose="grow"), outcome=outcome, seconds=1.0)


def timed(times: Mapping[int, float]) -> BatchCurve:
    return BatchCurve(micro_step_s=times)


def test_an_optimizer_step_is_divided_by_its_micro_batches() -> None:
    records = [
        record(2, fit(peak_bytes=1, step_s=6.0), accumulation=4),
        record(8, out_of_memory()),
        record(4, fit(peak_bytes=1, step_s=2.5)),
        record(4, fit(peak_bytes=1, step_s=2.0)),  # of two measurements the faster: the other was disturbed
    ]
    assert BatchCurve.from_records(records).micro_step_s == {2: 1.5, 4: 2.0}


def test_a_size_that_ran_out_once_leaves_no_headroom() -> None:
    first = record(4, fit(peak_bytes=1))
    for repeats in ([out_of_memory()], [out_of_memory(), fit(peak_bytes=1)]):
        curve = BatchCurve.from_records([record(2, fit(peak_bytes=1)), first, *(record(4, each) for each in repeats)])
        assert not curve.leaves_headroom(first)
        assert (curve.fits, curve.too_large) == (2, 4)


def test_only_sizes_far_apart_show_the_cost_of_a_sample() -> None:
    close, wide, dear = timed({10: 5.0, 11: 5.01}), timed({1: 2.0, 11: 12.0}), timed({1: 2.0, 11: 22.0})
    assert least_sample_s([close]) == 0.0
    assert least_sample_s([close, wide, dear]) == pytest.approx(1.0)  # the cheapest
    assert least_sample_s([timed({1: 5.0, 8: 4.0})]) == 0.0  # noise: no sample costs less than nothing


def test_step_time_is_never_extrapolated_below_half_proportion() -> None:
    assert BatchCurve(micro_step_s={1: 1.0, 11: 6.0}).micro_step_at(21) == pytest.approx(11.0)
    noisy = BatchCurve(micro_step_s={12: 18.2, 25: 15.1})
    assert noisy.micro_step_at(172) == pytest.approx(15.1 * 172 / 25 / 2)
