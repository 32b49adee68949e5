"""Models of torch's pinned host allocator and of glibc's malloc, on which traces are replayed."""

from __future__ import annotations

from ..values import ForecastPhase, Trace
from .replay import Replay, phases


def peak_pinned_bytes(trace: Trace) -> int:
    """Return the most page-locked bytes at once.

    torch rounds each request up to a power of two, and keeps freed blocks for requests of the same size. The blocks in
    `trace.unrounded` come from other libraries: they have the requested size and are returned when freed.
    """
    sizes: list[int] = []
    cached: dict[int, int] = {}  # size of a free block → how many there are
    held = peak = 0
    for event in trace.events:
        if event >= 0:
            from_torch = len(sizes) not in trace.unrounded
            size = round_up_to_power_of_two(event) if from_torch else event
            sizes.append(size)
            if from_torch and cached.get(size, 0) > 0:
                cached[size] -= 1
            else:
                held += size
                peak = max(peak, held)
        elif ~event in trace.unrounded:
            held -= sizes[~event]
        else:
            cached[sizes[~event]] = cached.get(sizes[~event], 0) + 1
    return peak


def round_up_to_power_of_two(size: int) -> int:
    """Return the least power of two that is not below `size`; 0 for 0."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


_PAGE = 4096
_MAPPED_FROM = 65536  # bytes; smaller requests come from the heap
_BEFORE = 32
_ALIGNED = 64 + _BEFORE  # torch asks for 64-byte alignment: malloc adds that, and its header, before it rounds to pages
_HEADER = 16
# Of autograd's nodes, what they save beside tensors, and gaps between them, for each operator of a forward pass: the
# heap's growth (mallinfo2) in a step of mamba, kimi_linear, recurrent_gemma, zamba and rwkv was 1,400 to 1,900.
_GRAPH_BYTES = 1700


def _mapping_bytes(size: int) -> int:
    return -(-(size + _ALIGNED) // _PAGE) * _PAGE


_LEAST_MAPPING = _mapping_bytes(_MAPPED_FROM)


def replay_process(trace: Trace) -> Replay:
    """Replay a CPU rank's trace on glibc's malloc.

    The heap of small blocks keeps its size, so it counts as reserved at its peak, with autograd's graph of the longest
    forward pass. Large blocks are mappings of whole pages, which go when they are freed.
    """
    sizes: list[int] = []
    mapped = small = peak_small = peak_reserved = 0
    operators: dict[ForecastPhase, int] = {}
    allocated: dict[ForecastPhase, int] = {}
    # Collectives copy before an event; several before the same event run one after the other.
    copied: dict[int, int] = {}
    for count, size in trace.copied:
        copied[count] = max(copied.get(count, 0), size)
    for first, stop, phase in phases(trace):
        if trace.issued and stop > first:
            operators[phase] = max(operators.get(phase, 0), trace.issued[stop - 1] - trace.issued[first])
        peak = mapped + small
        peak_reserved = max(peak_reserved, mapped + peak_small)
        for index, event in enumerate(trace.events[first:stop], first):
            if copied.get(index, 0) >= _MAPPED_FROM:
                with_copy = mapped + _mapping_bytes(copied[index])
                peak, peak_reserved = max(peak, with_copy + small), max(peak_reserved, with_copy + peak_small)
            if event < 0:
                size = -sizes[~event]
            else:
                heap_bytes = -(-(event + _ALIGNED + _HEADER) // 16) * 16 if event else 0
                size = _mapping_bytes(event) if event >= _MAPPED_FROM else heap_bytes
                sizes.append(size)
            if abs(size) >= _LEAST_MAPPING:
                mapped += size
            else:
                small += size
                peak_small = max(peak_small, small)
            peak, peak_reserved = max(peak, mapped + small), max(peak_reserved, mapped + peak_small)
        allocated[phase] = max(allocated.get(phase, 0), peak)
    # An operator without a gradient has no node. With one it takes two or more to go back, beside the recomputed one.
    forward, backward = operators.get("forward", 0), operators.get("backward", 0)
    nodes = min(forward, max(0, backward - forward) // 2)
    return Replay(
        peak_reserved_bytes=peak_reserved + nodes * _GRAPH_BYTES,
        peak_allocated_bytes=max(allocated.values(), default=0),
        allocated_by_phase=allocated,
    )
