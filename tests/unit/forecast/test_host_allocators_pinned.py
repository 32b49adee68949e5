"""Page-locked host memory: power-of-two blocks that are kept."""

from __future__ import annotations

import pytest

from autods.forecast.host_allocators import replay_pinned, rounded
from autods.forecast.values import Trace

MIB = 2**20


def trace(*events: int) -> Trace:
    return Trace(events=events, marks=((0, "init"),))


@pytest.mark.parametrize(("asked", "held"), [(0, 0), (1, 1), (3, 4), (MIB, MIB), (MIB + 1, 2 * MIB)])
def test_a_request_is_rounded_up_to_a_power_of_two(asked: int, held: int) -> None:
    assert rounded(asked) == held
    assert replay_pinned(trace(asked)).held_bytes == held


def test_what_was_asked_for_is_told_beside_what_is_held() -> None:
    pinned = replay_pinned(trace(600 * MIB, 600 * MIB))
    assert (pinned.asked_bytes, pinned.held_bytes) == (1200 * MIB, 2048 * MIB)


def test_a_freed_block_is_kept_and_given_out_again_for_its_size_class() -> None:
    assert replay_pinned(trace(600 * MIB, -1, 1000 * MIB)).held_bytes == 1024 * MIB
    assert replay_pinned(trace(600 * MIB, -1, 500 * MIB)).held_bytes == (1024 + 512) * MIB


def test_a_buffer_that_deepspeed_locks_itself_keeps_its_size_and_is_returned() -> None:
    assert replay_pinned(trace(600 * MIB, 600 * MIB), unrounded={1}).held_bytes == (1024 + 600) * MIB
    assert replay_pinned(trace(600 * MIB, -1, 700 * MIB), unrounded={0, 1}).held_bytes == 700 * MIB


def test_above_torchs_threshold_nothing_is_rounded() -> None:
    assert replay_pinned(trace(600 * MIB, 3 * MIB), round_up_to_bytes=128 * MIB).held_bytes == 604 * MIB


def test_each_phase_tells_what_was_held_then() -> None:
    marks = ((0, "init"), (1, "forward"), (3, "step"))
    pinned = replay_pinned(Trace(events=(5 * MIB, 3 * MIB, -1, 8 * MIB), marks=marks))
    assert pinned.by_phase == {"init": 8 * MIB, "forward": 12 * MIB, "step": 12 * MIB}
