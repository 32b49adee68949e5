"""Which micro batch to try next: the peak is a line in the micro batch, in pieces, and measuring it costs a trial."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..outcomes import Fit
from ..values import Record
from .ask import fits_within

LONGEST_JUMP = 8  # times the largest micro batch that is known to fit
_BEFORE_THE_BEND = 4  # the same while the peak has not begun to grow
_CLOSE = 1 / 16  # a gap this small, relatively, is not worth a trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What is known of memory.

    peaks: micro batch → device peak measured, bytes, above `usable_bytes` too.
    good: the largest micro batch that fits and leaves the headroom (or 1, with which growing starts).
    bad: the smallest that is known not to, or None.
    """

    peaks: Mapping[int, int]
    usable_bytes: float
    good: int = 1
    bad: int | None = None

    def allowed(self) -> float | None:
        """The micro batch that would fill the usable memory by the line through the two largest that fit.

        None with one point; infinite where the line does not rise. The peak is the largest of several lines (forward
        and backward's, the optimizer step's), so it bends upwards only: this is an upper bound.
        """
        left = max((size for size in self.peaks if size < self.good), default=None)
        return None if left is None else self._filled(left, self.good)

    def under_the_chord(self) -> float:
        """The same by the chord to `bad`, where its peak was measured: a lower bound, for the same reason."""
        return self._filled(self.good, self.bad) if self.bad in self.peaks and self.bad is not None else self.good

    def _filled(self, left: int, right: int) -> float:
        bytes_each = (self.peaks[right] - self.peaks[left]) / (right - left)
        if bytes_each <= 0:
            return math.inf
        return left + (self.usable_bytes - self.peaks[left]) / bytes_each

    def surely(self) -> float:
        """A micro batch that must fit: as if all of the peak grew with it, none of it being parameters."""
        return self.good * self.usable_bytes / max(1, self.peaks[self.good])

    def between(self, sizes: Sequence[int]) -> Sequence[int]:
        """The sizes above `good` and below `bad`."""
        stop = len(sizes) if self.bad is None else bisect_left(sizes, self.bad)
        return sizes[bisect_right(sizes, self.good) : stop]


def survey(records: Iterable[Record], usable_bytes: float) -> Ground:
    """The ground as the records show it; the first is the walk's winner, and so micro batch 1 counts as good."""
    last = {}
    peaks: dict[int, int] = {}
    for record in records:
        size = record.trial.knobs.micro_batch
        last[size] = record
        if isinstance(record.outcome, Fit):
            peaks[size] = max(peaks.get(size, 0), record.outcome.device_peak_bytes)
    fitting = [size for size, record in last.items() if fits_within(record, usable_bytes)]
    return Ground(
        peaks=peaks,
        usable_bytes=usable_bytes,
        good=max([1, *fitting]),
        bad=min((size for size in last if size > 1 and size not in fitting), default=None),
    )


def next_size(ground: Ground, sizes: Sequence[int]) -> int | None:
    """The micro batch worth trying next, or None when the largest is found (closely enough)."""
    open_sizes = ground.between(sizes)
    if not open_sizes or ground.peaks[ground.good] > ground.usable_bytes:
        return None
    allowed = ground.allowed()
    if allowed is not None and allowed < ground.good + max(1.0, ground.good * _CLOSE):
        return None
    if ground.bad is None:
        return _jump(ground, open_sizes, allowed)
    if ground.bad - ground.good <= ground.good * _CLOSE:
        return None
    return _within(ground, open_sizes, ground.bad, allowed)


def _within(ground: Ground, sizes: Sequence[int], bad: int, allowed: float | None) -> int | None:
    """Between what fits and what does not: where the lines say, and halfway where they cannot."""
    if (found := _largest(sizes, ground.under_the_chord())) is not None:
        return found
    if allowed is not None and allowed < bad:
        return _largest(sizes, allowed)
    # A line that allows what is too large is from before a bend: halve the ratio of the two.
    return _largest(sizes, math.sqrt(ground.good * bad)) or sizes[0]


def _jump(ground: Ground, sizes: Sequence[int], allowed: float | None) -> int | None:
    """Upwards, with nothing known to be too large: to where the line says, but never far beyond what was measured."""
    match allowed:
        case None:
            target = max(ground.surely(), sizes[0])
        case math.inf:  # a flat line has not bent yet and tells nothing of what comes after
            target = max(ground.surely(), _BEFORE_THE_BEND * ground.good, sizes[0])
        case _:
            target = allowed
    found = _largest(sizes, min(target, LONGEST_JUMP * ground.good))
    if found is None and sizes[0] <= ground.surely():
        return sizes[0]  # the divisors of a global batch can lie further apart than the longest jump
    return found


def _largest(sizes: Sequence[int], most: float) -> int | None:
    at = len(sizes) if math.isinf(most) else bisect_right(sizes, most)
    return sizes[at - 1] if at else None
