"""What torch's caching host allocator holds of page-locked memory for a trace of pinned allocations.

Every request is rounded up to a power of two, and a freed block is kept for the next request of its size class;
nothing is given back, split or merged. Source: torch's ATen/core/CachingHostAllocator.h. Newer torch can leave large
requests unrounded (PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:N); by default it rounds them all.

DeepSpeed's async_io locks buffers of its own (`new_cpu_locked_tensor`), unrounded and freed to the system. In a trace
such a request is marked by `unrounded`: the numbers of its blocks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .values import ForecastPhase, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """held_bytes: the most that was page-locked at once; asked_bytes: the most that was asked for at once."""

    held_bytes: int
    asked_bytes: int
    by_phase: dict[ForecastPhase, int]


def rounded(size: int) -> int:
    """The block that a request gets: the next power of two."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


def replay_pinned(
    trace: Trace, *, unrounded: Collection[int] = frozenset(), round_up_to_bytes: int | None = None
) -> Pinned:
    """Page-locked bytes over a trace.

    unrounded: blocks that do not come from torch's allocator. round_up_to_bytes: torch's pinned_max_round_threshold;
    larger requests keep their size. None: all are rounded.
    """
    asked: list[int] = []
    classes: list[int] = []
    cached: dict[int, int] = {}
    now = most_asked = held = most_held = 0
    by_phase: dict[ForecastPhase, int] = {}
    marks = iter((*trace.marks, (len(trace.events) + 1, None)))
    coming, phase = next(marks)
    current: ForecastPhase = "init"
    for at, event in enumerate(trace.events):
        while at >= coming:
            current = phase or current
            coming, phase = next(marks)
        if event >= 0:
            own = len(asked) in unrounded
            large = round_up_to_bytes is not None and event > round_up_to_bytes
            size = event if own or large else rounded(event)
            asked.append(event)
            classes.append(-size if own else size)
            now += event
            if not own and cached.get(size, 0) > 0:
                cached[size] -= 1
            else:
                held += size
        else:
            size = classes[~event]
            now -= asked[~event]
            if size < 0:
                held += size
            else:
                cached[size] = cached.get(size, 0) + 1
        most_asked, most_held = max(most_asked, now), max(most_held, held)
        by_phase[current] = max(by_phase.get(current, 0), held)
    return Pinned(held_bytes=most_held, asked_bytes=most_asked, by_phase=by_phase)
