"""What torch's CUDA caching allocator holds for a trace of allocations: the replay of a trace through `heap.Heap`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .expandable import ExpandableHeap
from .heap import UNIT, Heap
from .values import ForecastPhase, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class RanOut:
    """The request that no segment could be had for, even after all cached segments were given back.

    event: its index in the trace. reserved_bytes, allocated_bytes: at that moment.
    """

    event: int
    phase: ForecastPhase
    wanted_bytes: int
    reserved_bytes: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What the allocator holds.

    by_phase: the reserved bytes when the phase last had to ask the driver for more, or the most it allocated when what
    was cached sufficed; the largest is peak_reserved_bytes while nothing is given back. retries: how often cached
    segments were given back to make room (torch's num_alloc_retries); late_retries: those after the first optimizer
    step, which come again in every step. ran_out: the replay ended there.
    """

    peak_reserved_bytes: int
    peak_allocated_bytes: int
    by_phase: dict[ForecastPhase, int]
    allocated_by_phase: dict[ForecastPhase, int]
    retries: int = 0
    late_retries: int = 0
    ran_out: RanOut | None = None

    @property
    def runs_well(self) -> bool:
        """It does not run out, and once it has settled no step gives memory back."""
        return self.ran_out is None and not self.late_retries


def replay(
    trace: Trace,
    *,
    expandable: bool = False,
    limit_bytes: int | None = None,
    max_split_bytes: int | None = None,
    whole: bool = True,
) -> Replayed:
    """The allocator's reserved and allocated bytes over a trace.

    limit_bytes: what the allocator may reserve; None: as much as it asks for. max_split_bytes: torch's max_split_size.
    whole: False ends the replay with the phase in which it is found not to run well.
    """
    kind = ExpandableHeap if expandable else Heap
    heap = kind(limit_bytes=limit_bytes, max_split_bytes=max_split_bytes)
    reserved: dict[ForecastPhase, int] = {}
    allocated: dict[ForecastPhase, int] = {}
    peak, ran_out = 0, None
    stepped, early = False, None
    for first, stop, phase in phases(trace):
        if stepped and phase != "step" and early is None:
            early = heap.retries
        stepped = stepped or phase == "step"
        heap.begin()
        failed = _run(heap, trace, first, stop)
        reserved[phase] = max(reserved.get(phase, 0), heap.grown * UNIT)
        allocated[phase] = max(allocated.get(phase, 0), heap.peak * UNIT)
        peak = max(peak, heap.grown)
        if failed is not None:
            ran_out = RanOut(
                event=failed,
                phase=phase,
                wanted_bytes=trace.events[failed],
                reserved_bytes=heap.reserved * UNIT,
                allocated_bytes=heap.allocated * UNIT,
            )
            break
        if not whole and early is not None and heap.retries > early:
            break
    return Replayed(
        peak_reserved_bytes=peak * UNIT,
        peak_allocated_bytes=max(allocated.values(), default=0),
        by_phase={phase: max(grown, allocated[phase]) for phase, grown in reserved.items()},
        allocated_by_phase=allocated,
        retries=heap.retries,
        late_retries=0 if early is None else heap.retries - early,
        ran_out=ran_out,
    )


def squeezed(trace: Trace, roomy: Replayed, *, expandable: bool = False, within: float = 0.01) -> tuple[int, Replayed]:
    """The least limit at which the trace runs well, and its replay there.

    roomy: the replay without a limit. A large card caches what a smaller one gives back once and never misses: what
    initialising leaves in pieces that no later request fits. within: how exactly, relatively.
    """
    low, high, best = roomy.peak_allocated_bytes, roomy.peak_reserved_bytes, roomy
    while high - low > max(2**21, within * high):
        middle = (low + high) // 2
        tried = replay(trace, expandable=expandable, limit_bytes=middle, whole=False)
        if tried.runs_well:
            high, best = middle, tried
        else:
            low = middle
    return high, best


def _run(heap: Heap, trace: Trace, first: int, stop: int) -> int | None:
    """Events `first` to `stop`, with what is emptied between them. The index of the one that ran out, or None."""
    for cut in (*(at for at in trace.emptied if first <= at < stop), stop):
        failed = heap.run(trace.events[first:cut])
        if failed is not None:
            return first + failed
        if cut < stop:
            heap.release_all()
        first = cut
    return None


def phases(trace: Trace) -> Iterator[tuple[int, int, ForecastPhase]]:
    """(first event, one past the last, phase); what comes before the first mark belongs to init."""
    marks = trace.marks
    if not marks or marks[0][0] > 0:
        marks = ((0, "init"), *marks)
    stops = [*(at for at, _ in marks[1:]), len(trace.events)]
    return ((first, stop, phase) for (first, phase), stop in zip(marks, stops, strict=True))
