"""Simulations of micro batches that were not simulated.

Over the micro batch, the bytes of each block lie on a line, and so does the work of each operator.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..types import Tier
from .predict.prices import Work
from .predict.replay import phases
from .predict.step_time import BITS, CODES, HOST, RUN, Schedule
from .values import ForecastPhase, Simulation, Trace

FAR = 61  # times the size from which a line starts, a prime: see `draw_line`


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The line through two simulations of one engine, the larger of which gives the order of events.

    `slopes` has the bytes that each block gains with a sample, by the tier of its trace.
    `work` is that of the last optimizer step; None where it lies on no line, and for engines without a schedule.
    `is_sure` tells that no block's slope had to be guessed.
    """

    smaller: Simulation
    larger: Simulation
    slopes: Mapping[Tier, array[int]]
    is_sure: bool
    work: WorkLine | None = None

    def proves(self, micro_batch: int) -> bool:
        """Return whether a simulation would tell nothing new: both ends are simulated, and all between is known."""
        is_whole = self.work is not None or self.larger.schedule is None
        return self.is_sure and is_whole and self.smaller.micro_batch <= micro_batch <= self.larger.micro_batch

    def reach(self, micro_batch: int) -> Simulation:
        """Return the simulation of a micro batch, as the line has it.

        Work that lies on no line stays that of the larger one: of memory only the cache of blocks that come back late
        hangs on it.
        """
        samples = micro_batch - self.larger.micro_batch
        traces = {tier: _stretch(trace, self.slopes[tier], samples) for tier, trace in self.larger.traces.items()}
        peaks = {tier: _find_peaks(trace) for tier, trace in traces.items()}
        live_bytes = {
            phase: {tier: peaks[tier].get(phase, 0) if tier in peaks else size for tier, size in tiers.items()}
            for phase, tiers in self.larger.live_bytes.items()
        }
        return replace(
            self.larger,
            micro_batch=micro_batch,
            live_bytes=live_bytes,
            traces=traces,
            summed_peak_bytes={},
            breakdown=traces["device"].split_peak() or self.larger.breakdown,
            schedule=self.larger.schedule if self.work is None else self.work.reach(samples),
            seconds=0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkLine:
    """The larger simulation's schedule. `gains` has the FLOPs and bytes that each of its works gains with a sample."""

    schedule: Schedule
    gains: tuple[tuple[float, float], ...]

    def reach(self, samples: int) -> Schedule:
        """Return the schedule with so many samples more."""
        works = (
            replace(work, flops=work.flops + samples * flops, bytes=round(work.bytes + samples * size))
            if flops or size
            else work
            for work, (flops, size) in zip(self.schedule.works, self.gains, strict=True)
        )
        return replace(self.schedule, works=tuple(works))


def draw_line(smaller: Simulation, larger: Simulation) -> Line | None:
    """Return the line through two micro batches of one engine; None where they do not tell.

    They must agree in everything but the sizes of traced blocks, in whole bytes a sample. Some operators copy a batch
    of several samples or sum over it, and not that of a single one. A block that only the larger one has grows from
    nothing where its size is divided by the samples, and else not at all. That is sure for multiples of a prime only:
    sizes of models are products of small factors.
    """
    if _list_fixed(smaller) != _list_fixed(larger):
        return None
    slopes: dict[Tier, array[int]] = {}
    for tier, trace in larger.traces.items():
        gains = _find_slopes(smaller.traces[tier], smaller.micro_batch, trace, larger.micro_batch)
        if gains is None:
            return None
        slopes[tier] = gains
    same = all(_count_blocks(trace) == _count_blocks(smaller.traces[tier]) for tier, trace in larger.traces.items())
    is_sure = same or larger.micro_batch % FAR == 0
    return Line(smaller=smaller, larger=larger, slopes=slopes, is_sure=is_sure, work=_draw_work_line(smaller, larger))


def _count_blocks(trace: Trace) -> int:
    return sum(event >= 0 for event in trace.events)


def _list_fixed(simulation: Simulation) -> tuple[object, ...]:
    """All that must not depend on the micro batch."""
    untraced = {
        phase: {tier: size for tier, size in tiers.items() if tier not in simulation.traces}
        for phase, tiers in simulation.live_bytes.items()
    }
    traces = {
        tier: ([phase for _, phase in trace.marks], len(trace.emptied), [size for _, size in trace.copied])
        for tier, trace in simulation.traces.items()
    }
    return (
        untraced, traces, simulation.nvme_bytes, simulation.families, simulation.assumed, simulation.is_upper_bound,
    )  # fmt: skip


def _find_slopes(few: Trace, smaller_batch: int, many: Trace, larger_batch: int) -> array[int] | None:
    sizes, samples = [event for event in few.events if event >= 0], larger_batch - smaller_batch
    slopes, at = array("q"), 0
    for size in (event for event in many.events if event >= 0):
        if at < len(sizes) and _is_on_line(sizes[at], size, smaller_batch, samples):
            slopes.append((size - sizes[at]) // samples)
            at += 1
        else:
            slopes.append(size // larger_batch if size % larger_batch == 0 else 0)
    return slopes if at == len(sizes) else None


def _is_on_line(smaller: float, larger: float, micro_batch: int, samples: int) -> bool:
    """Return whether bytes or FLOPs grow by a whole number with each sample, and none would need less than nothing."""
    slope, rest = divmod(larger - smaller, samples)
    return not rest and 0 <= slope * micro_batch <= smaller


def _draw_work_line(smaller: Simulation, larger: Simulation) -> WorkLine | None:
    """Return the line of the schedules; None where the two do not tell.

    They must agree in everything but the amounts of work. Work that only the larger one has grows from nothing; of a
    sum over the samples that is not quite true, whose result does not grow.
    """
    few, many = smaller.schedule, larger.schedule
    if few is None or many is None:
        return None
    joined = _Joined(smaller.micro_batch, larger.micro_batch)
    at = 0
    for event in many.events:
        other = few.events[at] if at < len(few.events) else None
        code = event & CODES
        if code not in (RUN, HOST):
            if event != other:
                return None
            joined.events.append(event)
            at += 1
            continue
        work = many.works[event >> BITS]
        met = few.works[other >> BITS] if other is not None and other & CODES == code else None
        if met is not None and joined.add(code, met, work):
            at += 1
        else:
            joined.add(code, None, work)
    if at != len(few.events):
        return None
    schedule = replace(many, events=joined.events, works=tuple(work for _, work in joined.places))
    return WorkLine(schedule=schedule, gains=tuple(joined.gains))


@dataclass(slots=True)
class _Joined:
    """The events of the larger schedule, with a work for each pair of works that meet."""

    smaller_batch: int
    larger_batch: int
    events: array[int] = field(default_factory=lambda: array("q"))
    places: dict[tuple[Work | None, Work], int] = field(default_factory=dict)
    gains: list[tuple[float, float]] = field(default_factory=list)

    def add(self, code: int, few: Work | None, many: Work) -> bool:
        """Enter an event of work that was `few` with fewer samples; return whether the two are on a line."""
        place = self.places.get((few, many))
        if place is None:
            gains = self._find_gains(few, many)
            if gains is None:
                return False
            place = self.places[few, many] = len(self.gains)
            self.gains.append(gains)
        self.events.append(place << BITS | code)
        return True

    def _find_gains(self, few: Work | None, many: Work) -> tuple[float, float] | None:
        if few is None:
            return many.flops / self.larger_batch, many.bytes / self.larger_batch
        samples = self.larger_batch - self.smaller_batch
        if (few.kind, few.name, few.dtype) != (many.kind, many.name, many.dtype):
            return None
        if (few.fresh, few.compared) != (many.fresh, many.compared):  # malloc maps large blocks alone: no line
            return None
        for smaller, larger in ((few.flops, many.flops), (few.bytes, many.bytes)):
            if not _is_on_line(smaller, larger, self.smaller_batch, samples):
                return None
        return (many.flops - few.flops) // samples, (many.bytes - few.bytes) // samples


def _stretch(trace: Trace, slopes: array[int], samples: int) -> Trace:
    """Return the trace with so many samples more."""
    gains = iter(slopes)
    events = array("q", (event + samples * next(gains) if event >= 0 else event for event in trace.events))
    return replace(trace, events=events)


def _find_peaks(trace: Trace) -> dict[ForecastPhase, int]:
    """Return the peak of the live bytes in each phase."""
    peaks: dict[ForecastPhase, int] = {}
    sizes, held_bytes = array("q"), 0
    for first, stop, phase in phases(trace):
        peak = max(held_bytes, peaks.get(phase, 0))
        for event in trace.events[first:stop]:
            if event >= 0:
                sizes.append(event)
                held_bytes += event
                if held_bytes > peak:
                    peak = held_bytes
            else:
                held_bytes -= sizes[~event]
        peaks[phase] = peak
    return peaks
