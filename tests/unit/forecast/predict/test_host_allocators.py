"""Host memory: power-of-two blocks that stay page-locked, and a CPU rank's pages and heap."""

from __future__ import annotations

import pytest

from autods.forecast.predict.host_allocators import peak_pinned_bytes, replay_process, round_up_to_power_of_two
from autods.forecast.values import Trace

KIB, MIB = 2**10, 2**20


def pinned(*events: int, unrounded: frozenset[int] = frozenset()) -> int:
    return peak_pinned_bytes(Trace(events=events, marks=((0, "init"),), unrounded=unrounded))


@pytest.mark.parametrize(("requested", "held"), [(0, 0), (1, 1), (3, 4), (MIB, MIB), (MIB + 1, 2 * MIB)])
def test_a_pinned_request_is_rounded_up_to_a_power_of_two(requested: int, held: int) -> None:
    assert round_up_to_power_of_two(requested) == held
    assert pinned(requested) == held


def test_a_freed_pinned_block_serves_requests_of_its_size_class() -> None:
    assert pinned(600 * MIB, -1, 1000 * MIB) == 1024 * MIB
    assert pinned(600 * MIB, -1, 500 * MIB) == (1024 + 512) * MIB


def test_a_buffer_that_deepspeed_locks_keeps_its_size_and_goes() -> None:
    assert pinned(600 * MIB, 600 * MIB, unrounded=frozenset({1})) == (1024 + 600) * MIB
    assert pinned(600 * MIB, -1, 700 * MIB, unrounded=frozenset({0, 1})) == 700 * MIB


def test_a_large_tensor_is_a_mapping_of_pages_that_goes_when_freed() -> None:
    replayed = replay_process(Trace(events=(MIB, -1, MIB, -2), marks=((0, "init"),)))
    assert replayed.peak_reserved_bytes == MIB + 4 * KIB  # its header needs a page of its own


def test_the_heap_of_small_blocks_keeps_its_size() -> None:
    small = 60 * KIB
    events = (*[small] * 10, *(-number - 1 for number in range(10)), MIB)
    replayed = replay_process(Trace(events=events, marks=((0, "init"),)))
    assert replayed.peak_reserved_bytes > MIB + 10 * small
    assert replayed.peak_allocated_bytes < MIB + 5 * KIB


def test_a_cpu_rank_has_a_peak_for_each_phase() -> None:
    marks = ((0, "init"), (2, "forward"), (3, "step"))
    peaks = replay_process(Trace(events=(MIB, -1, 8 * MIB), marks=marks)).allocated_by_phase
    assert list(peaks) == ["init", "forward", "step"]
    assert peaks["init"] < 2 * MIB < 8 * MIB < peaks["step"]


def test_the_copy_of_a_collective_counts_while_it_runs() -> None:
    marks = ((0, "init"), (1, "backward"), (2, "step"))
    events = (MIB, MIB, -2, MIB)
    replayed = replay_process(Trace(events=events, marks=marks, copied=((2, 8 * MIB), (2, 4 * MIB), (3, 100))))
    assert replayed.allocated_by_phase["init"] < 2 * MIB
    assert 10 * MIB < replayed.allocated_by_phase["step"] < 10 * MIB + 20 * KIB
    assert replayed.peak_reserved_bytes == replayed.allocated_by_phase["step"]


@pytest.mark.parametrize(("backward", "nodes"), [(60_000, 20_000), (30_000, 5_000), (10_000, 0)])
def test_the_graph_of_a_forward_pass_takes_room_on_the_heap(backward: int, nodes: int) -> None:
    """A layer that loops over tokens has many operators, and few bytes in tensors; some are without a gradient."""
    marks = ((0, "init"), (1, "forward"), (3, "backward"))
    trace = Trace(events=(MIB,) * 5, marks=marks, issued=(0, 10, 20_010, 20_020, 20_020 + backward))
    beside_tensors = replay_process(trace).peak_reserved_bytes - 5 * (MIB + 4 * KIB)
    assert 1400 * nodes <= beside_tensors <= 1900 * nodes  # as measured
