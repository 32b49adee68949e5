"""The budget of a CPU rank, as the kernel holds it to it, each in a process of its own; growth from step to step."""

from __future__ import annotations

import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from autods.rank.memory import CpuMeter, growth_per_step, status_bytes

MIB = 2**20


def run_in_process(done: Callable[[], str]) -> str:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(done).result()


def hold(size: int) -> str:
    try:
        held = bytearray(size)
    except MemoryError:
        return "ran out"
    return f"held {len(held) // MIB} MiB"


def within_the_budget() -> str:
    meter = CpuMeter(limit_bytes=64 * MIB)
    meter.start()
    within = hold(96 * MIB)
    meter.lift()
    return f"{within}, then {hold(96 * MIB)}"


def under_a_hard_limit() -> str:
    hard = status_bytes("VmData")["VmData"] + 256 * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (hard - 200 * MIB, hard))
    return f"{within_the_budget()}, {resource.getrlimit(resource.RLIMIT_DATA) == (hard, hard)}"


def beyond_a_hard_limit() -> str:
    resource.setrlimit(resource.RLIMIT_DATA, (2 * 2**30, 2 * 2**30))
    try:
        CpuMeter(limit_bytes=2 * 2**30).start()
    except OSError as error:
        return str(error)
    return "began"


def test_a_rank_runs_out_at_its_budget_until_it_is_lifted() -> None:
    assert run_in_process(within_the_budget) == "ran out, then held 96 MiB"


def test_lifting_the_budget_leaves_the_shells_hard_limit() -> None:
    assert run_in_process(under_a_hard_limit) == "ran out, then held 96 MiB, True"


def test_a_budget_above_the_shells_hard_limit_is_refused() -> None:
    message = run_in_process(beyond_a_hard_limit)
    assert "ulimit -Hd lets a process hold 2.0 GiB" in message


@pytest.mark.parametrize(
    ("held_mib", "growth_mib"),
    [
        ((300, 332, 364, 396, 428), 32),
        ((300, 340, 372, 404.5, 437, 468), 32.25),
        ((300, 340, 345, 370, 372, 402), 15),  # outputs of varying length are kept
        ((300, 300, 300, 300, 300), 0),
        ((100, 340, 340, 340, 340), 0),  # states are created in the first step
        ((300, 340, 338, 341, 343, 346), 0),  # lengths vary: not every step holds more
        ((300, 301, 301.2, 301.4, 301.6), 0),  # the heap grows in pieces
        ((300, 332, 364, 396), None),
        ((), None),
    ],
)
def test_memory_that_each_step_adds_is_a_leak(held_mib: tuple[float, ...], growth_mib: float | None) -> None:
    growth = growth_per_step([int(held * MIB) for held in held_mib])
    assert growth == (None if growth_mib is None else int(growth_mib * MIB))


def memory_of_a_list() -> str:
    meter = CpuMeter(limit_bytes=None)
    meter.start()
    before, held = meter.held_bytes(), bytearray(32 * MIB)
    during = meter.held_bytes() - before
    del held
    return f"{during // MIB} MiB, then {(meter.held_bytes() - before) // MIB}"


def test_memory_in_use_falls_when_it_is_freed() -> None:
    assert run_in_process(memory_of_a_list) == "32 MiB, then 0"


def memory_of_a_heap_with_holes() -> str:
    meter = CpuMeter(limit_bytes=None)
    meter.start()
    before, held = meter.held_bytes(), [bytes(1000) for _ in range(32_000)]
    kept = held[::100]
    del held
    return f"{(meter.held_bytes() - before) // MIB} MiB of {len(kept)} kB"


def test_holes_of_the_heap_are_no_leak() -> None:
    assert run_in_process(memory_of_a_heap_with_holes) == "0 MiB of 320 kB"


def memory_of_blocks_that_fit_into_the_free_heap() -> str:
    def hold_blocks() -> list[bytearray]:
        return [bytearray(MIB // 32) for _ in range(32 * 32)]

    last = hold_blocks().pop()  # the heap stays as large as it was below this block
    meter = CpuMeter(limit_bytes=None)
    meter.start()
    blocks = [last, *hold_blocks()]
    return f"{len(blocks)} blocks: {round((meter.peaks()['device'] or 0) / MIB, -1):.0f} MiB"


def test_memory_from_the_free_heap_counts() -> None:
    assert run_in_process(memory_of_blocks_that_fit_into_the_free_heap) == "1025 blocks: 30 MiB"
