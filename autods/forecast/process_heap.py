"""What glibc's malloc holds of a CPU rank's tensors, as autods starts its ranks (`cluster/node.py`).

MALLOC_MMAP_THRESHOLD_ is 64 KiB: each tensor from there on is a mapping of its own, of whole pages. Smaller ones share
the heap, which keeps its size while anything lies at its end. What collectives copy inside is a mapping for a moment.
"""

from __future__ import annotations

from .caching import Replayed, phases
from .values import ForecastPhase, Trace

_PAGE = 4096
_MAPPED_FROM = 65536
_BEFORE = 32
_ALIGNED = 64 + _BEFORE  # torch asks for 64-byte alignment: malloc adds that, and its header, before it rounds to pages
_HEADER = 16
_HUGE_FROM = 2 * 1024 * 1024  # torch wants huge pages for such a tensor, and so that it begins with a page of its own


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
    aligned = _PAGE + _BEFORE if size >= _HUGE_FROM else _ALIGNED
    return -(-(size + aligned) // _PAGE) * _PAGE
