"""Freed blocks that other streams still use: when the clocks of a machine let them go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autods.config.catalogue import read_catalogue
from autods.forecast.predict.memory_model import find_returns
from autods.forecast.predict.prices import PriceList, Unpriced, Work, read_constants
from autods.forecast.predict.step_time import HOST_WAITS_STREAM, RUN, Schedule
from autods.forecast.values import Trace

H100 = read_catalogue()["h100-80gb"]
LONG = Work(kind="matmul", flops=1e12, bytes=1, dtype="bfloat16")
LAUNCH, WAIT = RUN, HOST_WAITS_STREAM  # of the only work; for the default stream


def find(events: list[int], issued: list[int], schedule: tuple[int, ...], first: int = 0) -> dict[int, int]:
    """When block 0 comes back, which was allocated on another stream than the default one that uses it."""
    trace = Trace(events=events, marks=((0, "forward"),), issued=issued, users={0: (0,)}, held={0: len(events)})
    prices = PriceList(machine=H100, ranks_per_node=1, efficiency=read_constants().efficiency)
    return find_returns(trace, Schedule(events=schedule, works=(LONG,), first=first), prices)


def test_a_block_comes_back_when_the_host_has_waited() -> None:
    freed_after_a_kernel = [512, ~0, 512, 512]
    assert find(freed_after_a_kernel, [0, 1, 1, 2], (LAUNCH, WAIT)) == {0: 3}


def test_a_host_that_runs_ahead_gets_the_block_late() -> None:
    assert find([512, ~0, 512, 512], [0, 1, 2, 3], (LAUNCH, LAUNCH, LAUNCH)) == {0: 4}


def test_a_block_of_an_idle_stream_is_back_at_once() -> None:
    assert find([512, ~0, 512], [0, 0, 0], (LAUNCH,)) == {0: 2}


def test_no_block_comes_back_later_than_the_queue_allows() -> None:
    trace = Trace(events=[512, ~0, 512], marks=(), issued=[0, 1, 1], users={0: (0,)}, held={0: 2})
    prices = PriceList(machine=H100, ranks_per_node=1, efficiency=read_constants().efficiency)
    assert find_returns(trace, Schedule(events=(LAUNCH,), works=(LONG,)), prices) == {0: 2}


def test_blocks_of_earlier_steps_are_left_out() -> None:
    assert find([512, ~0, 512], [0, 1, 7], (LAUNCH,), first=5) == {}


def test_a_machine_without_rates_has_no_clocks() -> None:
    prices = PriceList(machine=replace(H100, rates=None), ranks_per_node=1, efficiency=read_constants().efficiency)
    with pytest.raises(Unpriced):
        find_returns(Trace(events=(), marks=()), Schedule(events=(LAUNCH,), works=(LONG,)), prices)
