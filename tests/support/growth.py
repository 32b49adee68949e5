"""Simulated memory that a caching allocator fragments."""

from __future__ import annotations

from autods.forecast.values import ForecastPhase

MIB, GIB = 2**20, 2**30
FRAGMENTED_LIVE = 2000 * MIB


def fragment(steps: int) -> tuple[list[int], tuple[tuple[int, ForecastPhase], ...]]:
    """In each step two buffers live, and after them one nearly as large as both: two fit into its segment in no step.

    The peak of live bytes is FRAGMENTED_LIVE. Segments of half and of nearly all of it are needed.
    """
    events: list[int] = []
    marks: list[tuple[int, ForecastPhase]] = [(0, "init")]
    for block in range(0, 3 * steps, 3):
        marks.append((len(events), "forward"))
        events += [FRAGMENTED_LIVE // 2, FRAGMENTED_LIVE // 2, ~block, ~(block + 1)]
        events += [FRAGMENTED_LIVE - 10 * MIB, ~(block + 2)]
        marks.append((len(events), "step"))
    return events, tuple(marks)
