"""Models of torch's pinned host allocator and of glibc's malloc, on which traces are replayed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .allocator import Replayed, phases
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


_PAGE = 4096
_MAPPED_FROM = 65536
_BEFORE = 32
_ALIGNED = 64 + _BEFORE  # torch asks for 64-byte alignment: malloc adds that, and its header, before it rounds to pages
_HEADER = 16


def replay_process(trace: Trace) -> Replayed:
    """As `caching.replay`, for the private memory of a process. What is kept (the small blocks' heap) counts as
    reserved at its peak, what is in use as allocated."""
    sizes: list[int] = []
    mapped = small = most_small = 0
    allocated: dict[ForecastPhase, int] = {}
    reserved: dict[ForecastPhase, int] = {}
    copied: dict[int, int] = {}  # before which event, and how much; of several there they come one after the other
    for count, size in trace.copied:
        copied[count] = max(copied.get(count, 0), size)
    for first, stop, phase in phases(trace):
        most, most_held = mapped + small, mapped + most_small
        for index, event in enumerate(trace.events[first:stop], first):
            if index in copied:
                size = copied[index]
                inside = mapped + (_pages(size) if size >= _MAPPED_FROM else 0)
                most, most_held = max(most, inside + small), max(most_held, inside + most_small)
            if event >= _MAPPED_FROM:
                size = _pages(event)
                sizes.append(size)
                mapped += size
            elif event > 0:
                size = -(-(event + _ALIGNED + _HEADER) // 16) * 16
                sizes.append(size)
                small += size
                most_small = max(most_small, small)
            elif event == 0:
                sizes.append(0)
                continue
            else:
                size = sizes[~event]
                if size >= _MAPPED_FROM:
                    mapped -= size
                else:
                    small -= size
                continue
            most, most_held = max(most, mapped + small), max(most_held, mapped + most_small)
        allocated[phase] = max(allocated.get(phase, 0), most)
        reserved[phase] = max(reserved.get(phase, 0), most_held)
    return Replayed(
        peak_reserved_bytes=max(reserved.values(), default=0),
        peak_allocated_bytes=max(allocated.values(), default=0),
        by_phase=reserved,
        allocated_by_phase=allocated,
    )


def _pages(size: int) -> int:
    """What a mapping of its own takes."""
    return -(-(size + _ALIGNED) // _PAGE) * _PAGE
