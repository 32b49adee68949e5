"""The largest micro batch that fits, found with few measurements on one simulated engine.

With gradient checkpointing the peak is only piecewise linear in the batch, and its slope grows: a line through two
small batches promises too much, the chord of a bracket too little. So each guess is measured, and the answer is a
batch that was itself seen to fit, beside one that was seen not to.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MOST_MICRO_BATCH = 4096
MOST_MEASUREMENTS = 8
_NOTICEABLE = 0.1  # of a bracket: a chord that moves less is misled by a steep end
_NEAR = 1.03  # a bracket of 100 and 103 is not worth another simulation
# Micro batch → how full the fullest tier is, peak over limit; it fits up to 1.
Fill = Callable[[int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest micro batch that was measured as fitting, None when none was.

    refused: the smallest that was measured as not fitting, None when all fit. proven: none or next to none is left
    between the two. slope: of the fill, a sample, at the answer; None where it was not seen.
    """

    micro_batch: int | None
    refused: int | None
    proven: bool
    measured: tuple[int, ...]
    slope: float | None = None


def largest(
    fill: Fill,
    sizes: Sequence[int],
    *,
    known: tuple[int, float] | None = None,
    slope: float | None = None,
    most: int = MOST_MEASUREMENTS,
) -> Largest:
    """Search `sizes` (ascending) with at most `most` measurements; `known` is one that was made already.

    slope: what another rung's search found. Rungs share the activations, so it is a good first guess, and no more.
    """
    seen: dict[int, float] = dict([known]) if known else {}
    while len(seen) - bool(known) < most and (size := _next(seen, sizes, slope)) is not None:
        seen[size] = fill(size)
    fits, refused = _bracket(seen)
    steep = (seen[refused] - seen[fits]) / (refused - fits) if fits and refused else None
    proven = _next(seen, sizes) is None
    return Largest(micro_batch=fits, refused=refused, proven=proven, measured=tuple(seen), slope=steep)


def _bracket(seen: dict[int, float]) -> tuple[int | None, int | None]:
    """The smallest that does not fit, and the largest below it that does."""
    refused = min((size for size, full in seen.items() if full > 1), default=None)
    fitting = (size for size, full in seen.items() if full <= 1 and (refused is None or size < refused))
    return max(fitting, default=None), refused


def _next(seen: dict[int, float], sizes: Sequence[int], slope: float | None = None) -> int | None:
    """The size to measure next, None when nothing is left to ask."""
    fits, refused = _bracket(seen)
    first = 0 if fits is None else bisect_right(sizes, fits)
    last = len(sizes) if refused is None else bisect_left(sizes, refused)
    left = sizes[first:last]
    if not left or (fits is not None and refused is not None and refused <= _NEAR * fits):
        return None
    if fits is None:
        return left[0]
    target = _extrapolated(seen, fits, slope) if refused is None else _interpolated(seen, fits, refused)
    return left[max(0, bisect_right(left, target) - 1)]


def _extrapolated(seen: dict[int, float], fits: int, guess: float | None) -> float:
    """Where the line through the two largest sizes reaches the limit; 8 times the size where there is no line yet."""
    before = max((size for size in seen if size < fits), default=None)
    slope = (guess or 0.0) if before is None else (seen[fits] - seen[before]) / (fits - before)
    if slope <= 0:
        return 8.0 * fits
    target = fits + (1 - seen[fits]) / slope
    return target if before is None else min(target, 16.0 * fits)


def _interpolated(seen: dict[int, float], fits: int, refused: int) -> float:
    """Where the peak should cross the limit, between a batch that fits and one that does not.

    The peak grows ever faster, so the chord of the bracket crosses too early, and the line through two batches that do
    not fit too late, unless they lie on the same piece. Where neither helps, the geometric middle.
    """
    beyond = min((size for size in seen if size > refused), default=None)
    if beyond is not None and math.isfinite(slope := (seen[beyond] - seen[refused]) / (beyond - refused)) and slope > 0:
        return max(fits + 1, min(refused - (seen[refused] - 1) / slope, refused - 1))
    chord = fits + (1 - seen[fits]) / (seen[refused] - seen[fits]) * (refused - fits)
    return chord if chord - fits > _NOTICEABLE * (refused - fits) else math.sqrt(fits * refused)
