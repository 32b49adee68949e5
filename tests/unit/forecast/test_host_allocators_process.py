"""A CPU rank's private memory: whole pages for tensors from 64 KiB on, one heap for the small ones."""

from __future__ import annotations

from autods.forecast.host_allocators import replay_process
from autods.forecast.values import Trace

KIB, MIB = 2**10, 2**20


def test_a_large_tensor_is_a_mapping_of_whole_pages_and_goes_when_freed() -> None:
    replayed = replay_process(Trace(events=(MIB, -1, MIB, -2), marks=((0, "init"),)))
    assert replayed.peak_reserved_bytes == MIB + 4 * KIB  # its header needs a page of its own


def test_the_small_ones_heap_keeps_its_size() -> None:
    small = 60 * KIB
    events = (*[small] * 10, *(-number - 1 for number in range(10)), MIB)
    replayed = replay_process(Trace(events=events, marks=((0, "init"),)))
    assert replayed.peak_reserved_bytes > MIB + 10 * small
    assert replayed.peak_allocated_bytes < MIB + 5 * KIB


def test_each_phase_tells_its_own_peak() -> None:
    marks = ((0, "init"), (2, "forward"), (3, "step"))
    replayed = replay_process(Trace(events=(MIB, -1, 8 * MIB), marks=marks))
    assert list(replayed.by_phase) == ["init", "forward", "step"]
    assert replayed.by_phase["init"] < 2 * MIB < 8 * MIB < replayed.by_phase["step"]


def test_what_a_collective_copies_counts_while_it_runs() -> None:
    marks = ((0, "init"), (1, "backward"), (2, "step"))
    events = (MIB, MIB, -2, MIB)
    replayed = replay_process(Trace(events=events, marks=marks, copied=((2, 8 * MIB), (2, 4 * MIB), (3, 100))))
    assert replayed.by_phase["init"] < 2 * MIB
    assert 10 * MIB < replayed.by_phase["step"] < 10 * MIB + 20 * KIB
    assert replayed.peak_reserved_bytes == replayed.by_phase["step"]
