"""Peak memory and step time of one config by micro batch: measured, interpolated and extrapolated.

Growth, race, certificate and probe share it. `BatchCurve.from_records(records, usable_bytes)` collects the
measurements. `next_size` proposes the next micro batch by memory. `micro_step_at` extrapolates the time of a step.
`throughput_bound` is the throughput that the config may still reach.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..types import Fit, OutOfMemory, Record
from .trials import fits_well, fits_within, median_step_s

LONGEST_JUMP = 8  # times the largest micro batch that is known to fit
_LONGEST_FLAT_JUMP = 4  # the same while the peak has not begun to grow
_CLOSE = 1 / 16  # relative distance of two micro batches below which nothing between them is worth a trial
_WIDE = 2  # ratio of two micro batches from which their times show the cost of a sample; closer ones show noise
SURE = 0.85  # share of a measured slope that is relied upon, for its noise
WORTH_GROWING = 1.02  # predicted gain that is worth a trial


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """Device peak as a line in the micro batch: fixed_bytes + bytes_each × micro batch."""

    fixed_bytes: float
    bytes_each: float

    @classmethod
    def through(cls, peak_bytes: Mapping[int, int], left: int, right: int) -> MemoryLine:
        """The line through the peaks of two micro batches."""
        bytes_each = (peak_bytes[right] - peak_bytes[left]) / (right - left)
        return cls(fixed_bytes=peak_bytes[left] - bytes_each * left, bytes_each=bytes_each)

    def largest(self, usable_bytes: float) -> float:
        """The micro batch that fills the usable memory; infinite where the line does not rise."""
        return (usable_bytes - self.fixed_bytes) / self.bytes_each if self.bytes_each > 0 else math.inf


class ThroughputBound(NamedTuple):
    """The most samples a second that a rank may reach, and the micro batch to measure for it; None: nothing is left."""

    rate: float
    size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCurve:
    """Measurements of one config.

    `peak_bytes` has the device peak of each micro batch, those above `usable_bytes` included.
    `micro_step_s` has the seconds of one micro batch's forward and backward with its share of the optimizer step.
    Repeated trials count by their fastest.
    `ran_out` has the micro batches of which a trial ran out of memory.
    `fits` is the largest micro batch that leaves the headroom, or the smallest one of the model.
    `too_large` is the smallest that does not; None when there is none.
    """

    peak_bytes: Mapping[int, int] = field(default_factory=dict)
    micro_step_s: Mapping[int, float] = field(default_factory=dict)
    ran_out: Set[int] = frozenset()
    usable_bytes: float = math.inf
    fits: int = 1
    too_large: int | None = None

    @classmethod
    def from_records(cls, records: Iterable[Record], usable_bytes: float = math.inf, smallest: int = 1) -> BatchCurve:
        """The curve of one config's trials; `smallest` is the micro batch below which the model cannot be trained.

        A repeated micro batch fits if its last trial did, and none ran out of memory or exceeded the usable memory.
        """
        last: dict[int, Record] = {}
        peaks: dict[int, int] = {}
        times: dict[int, float] = {}
        ran_out: set[int] = set()
        for record in records:
            size = record.trial.knobs.micro_batch
            last[size] = record
            if isinstance(record.outcome, Fit):
                peak_bytes: float = record.outcome.device_peak_bytes
                if record.trial.knobs.keeps_headroom and fits_within(record, usable_bytes):
                    peak_bytes = min(peak_bytes, usable_bytes)
                peaks[size] = max(peaks.get(size, 0), int(peak_bytes))
                if record.outcome.step_s:
                    seconds = median_step_s(record) / record.trial.knobs.accumulation
                    times[size] = min(seconds, times.get(size, math.inf))
            elif isinstance(record.outcome, OutOfMemory):
                ran_out.add(size)
        curve = cls(peak_bytes=peaks, micro_step_s=times, ran_out=ran_out, usable_bytes=usable_bytes)
        fitting = [size for size, record in last.items() if curve.leaves_headroom(record)]
        too_large = min((size for size in last if size > smallest and size not in fitting), default=None)
        return replace(curve, fits=max([smallest, *fitting]), too_large=too_large)

    # Memory

    def leaves_headroom(self, record: Record) -> bool:
        """Whether the trial fitted well, and no repeat ran out of memory or exceeded the usable memory."""
        size = record.trial.knobs.micro_batch
        return fits_well(record) and size not in self.ran_out and self.peak_bytes[size] <= self.usable_bytes

    def line_limit(self) -> float | None:
        """The micro batch that fills the usable memory by the line through the two largest that fit; None with one.

        The peak is the largest of several lines (forward and backward, optimizer step), so it bends upwards only: this
        is an upper bound. It is infinite where the line does not rise.
        """
        left = max((size for size in self.peak_bytes if size < self.fits), default=None)
        if left is None:
            return None
        return MemoryLine.through(self.peak_bytes, left, self.fits).largest(self.usable_bytes)

    def open_sizes(self, sizes: Sequence[int]) -> Sequence[int]:
        """Those of `sizes` between the largest that fits and the smallest that is too large."""
        stop = len(sizes) if self.too_large is None else bisect_left(sizes, self.too_large)
        return sizes[bisect_right(sizes, self.fits) : stop]

    def next_size(self, sizes: Sequence[int]) -> int | None:
        """The micro batch of `sizes` (ascending) to try next; None when the largest that fits is known closely."""
        sizes, fits, too_large = self.open_sizes(sizes), self.fits, self.too_large
        if not sizes or self.peak_bytes.get(fits, 0) > self.usable_bytes:
            return None
        if fits not in self.peak_bytes:  # the larger ones that were tried ran out when they were repeated
            return None if too_large is None else _find_between(sizes, fits, too_large)
        limit, closest = self.line_limit(), fits + max(1.0, fits * _CLOSE)
        if too_large is not None:
            if too_large - fits <= fits * _CLOSE:
                return None
            if too_large in self.peak_bytes:  # the chord lies above the peaks between, so its limit is a lower bound
                chord_limit = MemoryLine.through(self.peak_bytes, fits, too_large).largest(self.usable_bytes)
                if chord_limit >= closest and (size := _largest_up_to(sizes, chord_limit)) is not None:
                    return size
        if limit is not None and limit < closest:
            return None
        if too_large is not None:
            if limit is not None and limit < too_large:
                return _largest_up_to(sizes, limit)
            return _find_between(sizes, fits, too_large)  # the line through what fits is from before a bend
        # All of the peak cannot grow faster than in proportion to the micro batch, so this size must fit.
        certain = fits * self.usable_bytes / max(1, self.peak_bytes[fits])
        if limit is None:
            limit = max(certain, sizes[0])
        elif math.isinf(limit):  # a flat line has not bent yet and says nothing about larger sizes
            limit = max(certain, _LONGEST_FLAT_JUMP * fits, sizes[0])
        size = _largest_up_to(sizes, min(limit, LONGEST_JUMP * fits))
        # The divisors of a global batch can lie further apart than the longest jump.
        return sizes[0] if size is None and sizes[0] <= certain else size

    # Time

    def micro_step_at(self, micro_batch: int) -> float:
        """Seconds of a micro step: measured, interpolated, or extrapolated; 0 when nothing was measured.

        Beyond the largest measured size, the line through the two largest counts. The seconds grow at least half as
        fast as the size: one point does not tell which part is constant, and noise can hide that a step becomes longer.
        """
        times = self.micro_step_s
        if micro_batch in times or not times:
            return times.get(micro_batch, 0.0)
        below = max((size for size in times if size < micro_batch), default=None)
        above = min((size for size in times if size > micro_batch), default=None)
        if above is None:
            largest = max(times)
            hopeful = times[largest] * max(1.0, micro_batch / largest / 2)
            if len(times) == 1:
                return hopeful
            each = max(0.0, self.slope(sorted(times)[-2], largest))
            return max(hopeful, times[largest] + each * (micro_batch - largest))
        if below is None:
            return times[above] * micro_batch / above
        return times[below] + self.slope(below, above) * (micro_batch - below)

    def throughput_bound(self, most: float, sample_s: float) -> ThroughputBound:
        """The most that the config may reach with a micro batch up to `most`, from the largest measured up to there.

        `sample_s` is the least that one more sample costs, see `least_sample_s`.
        """
        most = most if math.isinf(most) else math.floor(most)
        times = {size: seconds for size, seconds in self.micro_step_s.items() if size <= most}
        if not times:
            return ThroughputBound(rate=math.inf)
        last = max(times)
        best = max(size / seconds for size, seconds in times.items())
        if most <= last:
            return ThroughputBound(rate=best)
        each = SURE * sample_s
        if math.isinf(most):
            rate, size = (1 / each if each > 0 else math.inf), 2 * last
        else:
            rate, size = most / (times[last] + each * (most - last)), int(most)
        return ThroughputBound(rate=max(best, rate), size=size if rate > best * WORTH_GROWING else None)

    def slope(self, small: int, large: int) -> float:
        """Seconds of one more sample between two measured micro batches."""
        return (self.micro_step_s[large] - self.micro_step_s[small]) / (large - small)


def least_sample_s(curves: Iterable[BatchCurve]) -> float:
    """Seconds that one more sample costs at least, by the cheapest of these configs; 0 where none shows it.

    Rungs run the same model on the same device, so a sample costs them about the same arithmetic.
    """
    ends = [(curve, min(curve.micro_step_s), max(curve.micro_step_s)) for curve in curves if curve.micro_step_s]
    costs = [curve.slope(small, large) for curve, small, large in ends if large >= _WIDE * small]
    return max(0.0, min(costs, default=0.0))


def well_below(sizes: Iterable[int], size: int) -> int | None:
    """The largest of `sizes` that is far enough below `size` for their times to show the cost of a sample."""
    return max((other for other in sizes if size >= _WIDE * other), default=None)


def _find_between(sizes: Sequence[int], fits: int, too_large: int) -> int:
    """The one of `sizes` that halves the ratio of the two."""
    return _largest_up_to(sizes, math.sqrt(fits * too_large)) or sizes[0]


def _largest_up_to(sizes: Sequence[int], most: float) -> int | None:
    end = len(sizes) if math.isinf(most) else bisect_right(sizes, most)
    return sizes[end - 1] if end else None
