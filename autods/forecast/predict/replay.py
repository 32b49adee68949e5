"""Replays of allocation traces on the model of torch's allocator: what they reserve, and the least limit that does."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..values import ForecastPhase, Trace
from .allocator import UNIT, ExpandableHeap, Heap


@dataclass(frozen=True, slots=True, kw_only=True)
class RanOut:
    """A request for which no memory was left, even after all cached segments had been given back."""

    phase: ForecastPhase
    wanted_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How much an allocator held over a trace.

    `retries` counts how often cached segments were given back to make room (torch's num_alloc_retries). `late_retries`
    are those of the last optimizer step, which come again in every step, and `late_returned` the segments (or pages of
    expandable ones) that they gave back. A replay ends where it `ran_out`.
    The replay is the same at every limit from `same_from_bytes` to its own.
    """

    peak_reserved_bytes: int
    peak_allocated_bytes: int
    allocated_by_phase: Mapping[ForecastPhase, int]
    retries: int = 0
    late_retries: int = 0
    late_returned: int = 0
    ran_out: RanOut | None = None
    same_from_bytes: int = 0

    @property
    def runs_well(self) -> bool:
        """Whether it does not run out and its last step, unless it is the only one, gives no memory back."""
        return self.ran_out is None and not self.late_retries

    @property
    def runs_full(self) -> bool:
        """Whether it does not run out, and gives memory back in each step."""
        return self.ran_out is None and self.late_retries > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A replay without a limit at the begin of a phase: how many phases it has done, and the next event.

    `allocated` has the most that was allocated in the phases so far.
    """

    phases: int
    event: int
    heap: Heap
    allocated: Mapping[ForecastPhase, int]


def replay(
    trace: Trace,
    *,
    expandable: bool = False,
    limit_bytes: int | None = None,
    only_if_well: bool = False,
    begun: Sequence[Begun] = (),
    keep: list[Begun] | None = None,
) -> Replay:
    """Replay a trace on torch's allocator, which may reserve `limit_bytes`; None is no limit.

    `only_if_well` stops the replay after the first phase that does not run well. The trace's held blocks come back
    late; without any, as where the streams that use them are never behind, all come back at once.
    A replay without a limit can `keep` where its phases begin. One of the same trace, or of that with its last step
    once more, starts at the last of these that its limit would not have changed.
    """
    mark, before = _find_last_step(trace), None
    start = _find_start(trace, mark, limit_bytes, begun)
    if start is None:
        kind = ExpandableHeap if expandable else Heap
        heap: Heap = kind(limit_bytes=limit_bytes, streams=trace.streams, late=trace.held)
        allocated: dict[ForecastPhase, int] = {}
    else:
        heap, allocated = start.heap.copy(limit_bytes, trace.streams), dict(start.allocated)
    done = 0 if start is None else start.phases
    back: dict[int, list[int]] = {}
    for block, at in trace.held.items():
        back.setdefault(at, []).append(block)
    cuts = sorted({*back, *trace.emptied})
    ran_out: RanOut | None = None
    for place, (first, stop, phase) in enumerate(phases(trace)):
        if place < done:
            continue
        if keep is not None:
            keep.append(Begun(phases=place, event=first, heap=heap.copy(None, heap.streams), allocated=dict(allocated)))
        if mark is not None and first == trace.marks[mark][0]:
            before = heap.retries, heap.returned
        heap.peak_allocated = heap.allocated
        for cut in (*cuts[bisect_left(cuts, first) : bisect_left(cuts, stop)], stop):
            failed = heap.run(trace.events[first:cut])
            if failed is not None:
                ran_out = RanOut(phase=phase, wanted_bytes=trace.events[first + failed])
                break
            if cut < stop:
                heap.give_back(back.get(cut, ()))
                if cut in trace.emptied:
                    heap.release_all()
            first = cut
        allocated[phase] = max(allocated.get(phase, 0), heap.peak_allocated * UNIT)
        thrashes = before is not None and heap.retries > before[0]
        if ran_out is not None or (only_if_well and thrashes):
            break
    return Replay(
        peak_reserved_bytes=heap.peak_reserved * UNIT,
        peak_allocated_bytes=max(allocated.values(), default=0),
        allocated_by_phase=allocated,
        retries=heap.retries,
        late_retries=0 if before is None else heap.retries - before[0],
        late_returned=0 if before is None else heap.returned - before[1],
        ran_out=ran_out,
        same_from_bytes=heap.most_granted * UNIT,
    )


def _find_start(trace: Trace, last_step: int | None, limit_bytes: int | None, begun: Sequence[Begun]) -> Begun | None:
    """Return the last of these beginnings that the limit would not have changed; none behind the last step's."""
    last = len(trace.events) if last_step is None else trace.marks[last_step][0]
    most_bytes = math.inf if limit_bytes is None else limit_bytes
    alike = [start for start in begun if start.event <= last and start.heap.most_granted * UNIT <= most_bytes]
    return alike[-1] if alike else None


def find_least_limit(
    trace: Trace,
    unlimited: Replay,
    *,
    expandable: bool = False,
    tolerance: float = 0.01,
    bound_bytes: int | None = None,
    begun: Sequence[Begun] = (),
) -> tuple[int, Replay]:
    """Return the least limit in bytes at which the trace runs well, and its replay there.

    A large card caches pieces that initialising leaves and no later request fits. A smaller card gives them back once,
    and never misses them. Whether it does is seen in a repeated step: the second one may still give back what only the
    first has left. `tolerance` is relative.

    The need is not monotonic: the trace may run out of a limit above the answer. It was replayed at the answer itself.
    The peak without a limit may be too little. The repeated step may need more. And torch asks for a whole segment
    before it knows how few pages it has to map.

    With `bound_bytes` only whether the answer is above it is as without: the search ends as soon as it knows that, with
    the middle of what is left of it. `begun` has where the phases of the replay without a limit begin.
    """
    trace = repeat_last_step(trace)
    attempt_at = partial(replay, trace, expandable=expandable, only_if_well=True, begun=begun)
    low, high = unlimited.peak_allocated_bytes, unlimited.peak_reserved_bytes
    best: Replay | None = None
    while high - low > (margin := max(2**21, int(tolerance * high))):
        middle = (low + high) // 2
        if bound_bytes is not None and (low > bound_bytes or (best is not None and high <= bound_bytes)):
            return middle, best or unlimited
        if best is not None and middle >= best.same_from_bytes:
            high = middle
            continue
        attempt = attempt_at(limit_bytes=middle)
        if attempt.runs_well:
            high, best = middle, attempt
        else:
            low = middle
    while best is None:
        attempt = attempt_at(limit_bytes=high)
        if attempt.runs_well:
            best = attempt
        else:
            high += margin
    return high, best


def _find_last_step(trace: Trace) -> int | None:
    """Return the index of the mark that begins the last optimizer step; None where there are not two steps."""
    ends = [index for index, (_, phase) in enumerate(trace.marks[:-1]) if phase == "step"]
    return ends[-1] + 1 if ends else None


def repeat_last_step(trace: Trace) -> Trace:
    """Return the trace with its last optimizer step once more.

    A block that outlives the step is the one that the repeated step frees, where the step had freed one of this size
    that was older than itself. Where the two do not match, or there is one step, the trace is returned as it is.
    """
    mark = _find_last_step(trace)
    if mark is None:
        return trace
    first = trace.marks[mark][0]
    sizes = [event for event in trace.events if event >= 0]
    step = trace.events[first:]
    older = sum(event >= 0 for event in trace.events[:first])  # blocks
    freed = {~event for event in step if event < 0}
    outliving: defaultdict[int, deque[int]] = defaultdict(deque)
    for block in range(older, len(sizes)):
        if block not in freed:
            outliving[sizes[block]].append(block)
    if Counter(sizes[block] for block in freed if block < older) != {
        size: len(blocks) for size, blocks in outliving.items()
    }:
        return trace
    count, events, held = len(sizes) - older, array("q", trace.events), dict(trace.held)
    for event in step:
        if event < 0:
            block = ~event + count if ~event >= older else outliving[sizes[~event]].popleft()
            if ~event in trace.held:
                held[block] = trace.held[~event] + len(step)
            event = ~block
        events.append(event)
    marks = ((at + len(step), phase) for at, phase in trace.marks[mark:])
    emptied = (at + len(step) for at in trace.emptied if at >= first)
    streams = array("B", trace.streams)
    return replace(
        trace,
        events=events,
        marks=(*trace.marks, *marks),
        emptied=(*trace.emptied, *emptied),
        held=held,
        streams=streams + streams[older:] if streams else (),
    )


def phases(trace: Trace) -> Iterator[tuple[int, int, ForecastPhase]]:
    """Yield (first event, one past the last, phase). Events before the first mark belong to init."""
    marks = trace.marks
    if not marks or marks[0][0] > 0:
        marks = ((0, "init"), *marks)
    stops = [*(at for at, _ in marks[1:]), len(trace.events)]
    return ((first, stop, phase) for (first, phase), stop in zip(marks, stops, strict=True))
