from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy
import pytest

from autods.forecast.largest_batch import MOST_MEASUREMENTS, find_largest

SIZES = range(1, 4097)


class Engine:
    """A made-up engine: `fill` of a batch, and which batches were measured."""

    def __init__(self, fill: Callable[[int], float]) -> None:
        self.fill = fill
        self.measured: list[int] = []

    def __call__(self, size: int) -> dict[str, float]:
        self.measured.append(size)
        return {"device": self.fill(size)}


def kinked(size: int) -> float:
    """As with gradient checkpointing: flat while the gradients decide, then steep when the logits do."""
    return max(0.4, 0.2 + 0.01 * size, 0.02 * size - 0.1)


def test_the_answer_was_measured_and_the_next_size_does_not_fit() -> None:
    engine = Engine(kinked)
    found = find_largest(engine, SIZES, known=(1, {"device": kinked(1)}))
    assert (found.micro_batch, found.refused, found.proven) == (55, 56, True)
    assert {55, 56} <= set(engine.measured)


def test_of_sizes_close_to_the_answer_the_largest_is_found() -> None:
    # T5-3B on 80 GiB: fills of zero2-offload as they were simulated, and lines between them.
    sizes = [1, 8, 128, 394, 395, 396, 398, 424, 458, 4096]
    fills = [0.15726, 0.15743, 0.38205, 0.99707, 0.99929, 1.00148, 1.00585, 1.06286, 1.14757, 9.6]
    engine = Engine(lambda size: float(numpy.interp(size, sizes, fills)))
    found = find_largest(engine, SIZES, known=(1, {"device": fills[0]}))
    assert (found.micro_batch, found.refused, found.proven) == (395, 396, True)


def test_a_line_that_points_below_what_fits_is_left() -> None:
    # Llama-7B on 80 GiB under zero2: fragments make the peak uneven, and the sizes that do not fit lie on a flat line.
    sizes = [1, 8, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 49, 4096]
    fills = [
        0.375,
        0.4662,
        0.791,
        0.8161,
        0.8323,
        0.8107,
        0.8289,
        0.8952,
        0.9143,
        0.8776,
        0.9013,
        1.0033,
        1.0287,
        0.9535,
    ]
    fills += [1.0665, 1.0852, 1.1118, 1.2132, 50.0]
    engine = Engine(lambda size: float(numpy.interp(size, sizes, fills)))
    found = find_largest(engine, SIZES, known=(1, {"device": fills[0]}))
    assert (found.micro_batch, found.refused, found.proven) == (31, 32, True)
    assert len(engine.measured) <= 8


def test_a_known_measurement_is_not_made_again() -> None:
    engine = Engine(kinked)
    find_largest(engine, SIZES, known=(1, {"device": kinked(1)}))
    assert 1 not in engine.measured
    assert len(engine.measured) == len(set(engine.measured))


def test_a_line_through_two_small_batches_is_not_believed() -> None:
    # Batches 1 and 2 say that 60 would fit; the knee at 10 makes it 14.
    engine = Engine(lambda size: 0.3 + 0.0117 * size + max(0.0, 0.15 * (size - 10)))
    found = find_largest(engine, SIZES)
    assert found.micro_batch == 13
    assert found.proven


@pytest.mark.parametrize("seed", range(20))
def test_few_measurements_are_enough_whatever_the_knees_are(seed: int) -> None:
    draw = random.Random(seed)
    base = draw.uniform(0.05, 0.9)
    lines = [(10 ** draw.uniform(-4, -1), draw.uniform(-0.3, 0.6)) for _ in range(3)]
    engine = Engine(lambda size: max(base, *(start + slope * size for slope, start in lines)))
    found = find_largest(engine, SIZES)
    truth = max((size for size in SIZES if engine.fill(size) <= 1), default=None)
    assert len(engine.measured) <= MOST_MEASUREMENTS
    assert found.micro_batch is not None
    assert truth is not None
    assert 0.9 * truth <= found.micro_batch <= truth


def test_nothing_is_said_to_fit_when_the_smallest_does_not() -> None:
    found = find_largest(Engine(lambda size: 1.5), SIZES)
    assert (found.micro_batch, found.refused) == (None, 1)


def test_below_a_batch_that_does_not_fit_a_smaller_one_is_found() -> None:
    engine = Engine(lambda size: 0.1 + size / 10)
    found = find_largest(engine, SIZES, known=(64, engine(64)))
    assert (found.micro_batch, found.proven) == (9, True)


def test_a_batch_that_needs_no_memory_grows_to_the_cap_and_no_further() -> None:
    found = find_largest(Engine(lambda size: 0.1), SIZES)
    assert (found.micro_batch, found.refused, found.proven) == (4096, None, True)


def test_only_sizes_that_are_offered_are_measured() -> None:
    sizes = (1, 2, 3, 4, 6, 8, 12, 24)  # the divisors of a rank's share of the global batch
    engine = Engine(lambda size: size / 10)
    found = find_largest(engine, sizes)
    assert found.micro_batch == 8
    assert set(engine.measured) <= set(sizes)


def test_a_jump_in_the_peak_ends_with_a_bracket_that_says_so() -> None:
    engine = Engine(lambda size: 0.5 if size < 1000 else math.inf)
    found = find_largest(engine, SIZES, most=7)
    assert not found.proven
    assert found.micro_batch is not None
    assert found.refused is not None
    assert found.micro_batch < 1000 <= found.refused


def test_a_phase_that_does_not_decide_yet_says_where_memory_ends() -> None:
    # Llama-7B on 80 GiB under zero3: at small sizes the optimizer step decides, and the backward pass later.
    measured: list[int] = []

    def fill(size: int) -> dict[str, float]:
        measured.append(size)
        return {"step": 0.29, "backward": 0.235 + 0.0186 * size}

    found = find_largest(fill, SIZES, known=(1, {"step": 0.29, "backward": 0.2536}))
    assert (found.micro_batch, found.refused) == (41, 42)
    assert measured == [8, 41, 42]


def test_after_a_leap_too_far_the_sizes_that_fit_say_where() -> None:
    # Llama-7B on 80 GiB under zero3-offload-optimizer, where building decides at first.
    sizes, fills = [1, 8, 50, 51, 80, 128, 4096], [0.18, 0.2207, 0.9876, 1.0061, 1.5524, 2.4433, 70.0]
    engine = Engine(lambda size: float(numpy.interp(size, sizes, fills)))
    found = find_largest(engine, SIZES, known=(1, {"device": fills[0]}))
    assert (found.micro_batch, found.refused) == (50, 51)
    assert len(engine.measured) <= 5
