"""Simulations of micro batches that were not simulated: the bytes of each block lie on a line over the micro batch."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..types import Tier
from .predict.allocator import phases
from .values import ForecastPhase, Simulation, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The line through two simulations of one engine, the larger of which gives the order of events.

    `slopes` has the bytes that each block gains with a sample, by the tier of its trace.
    """

    larger: Simulation
    slopes: Mapping[Tier, array[int]]

    def reach(self, micro_batch: int) -> Simulation:
        """Return the simulation of a micro batch, as the line has it.

        The work stays that of the larger one: of memory only the cache of blocks that come back late hangs on it.
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
            seconds=0.0,
        )


def draw_line(smaller: Simulation, larger: Simulation) -> Line | None:
    """Return the line through two micro batches of one engine; None where they do not tell.

    They must agree in everything but the sizes of traced blocks, in whole bytes a sample. Blocks that only the larger
    one has grow from nothing: some operators copy a batch of several samples, and not that of a single one.
    """
    if _list_fixed(smaller) != _list_fixed(larger):
        return None
    slopes: dict[Tier, array[int]] = {}
    for tier, trace in larger.traces.items():
        gains = _find_slopes(smaller.traces[tier], smaller.micro_batch, trace, larger.micro_batch)
        if gains is None:
            return None
        slopes[tier] = gains
    return Line(larger=larger, slopes=slopes)


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
        elif size % larger_batch == 0:
            slopes.append(size // larger_batch)
        else:
            return None
    return slopes if at == len(sizes) else None


def _is_on_line(bytes_of_smaller: int, bytes_of_larger: int, micro_batch: int, samples: int) -> bool:
    """Return whether the block gains whole bytes with each sample, and no sample would need less than nothing."""
    slope, rest = divmod(bytes_of_larger - bytes_of_smaller, samples)
    return not rest and 0 <= slope * micro_batch <= bytes_of_smaller


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
