"""The search for the largest micro batch that fits, by the fill of the fullest tier."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

MOST_MICRO_BATCH = 4096
MOST_MEASUREMENTS = 10
_NOTICEABLE = 0.1  # of a bracket: where the chord moves less, its steep end misleads it


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestMicroBatch:
    """The result of a search for the largest micro batch that fits.

    `micro_batch` is the largest measured size that fits, or None when none does.
    `refused` is the smallest measured size that does not fit, or None when all fit.
    `proven` is whether the search is done: no size is left between the two.
    `failures` maps each size that could not be simulated to the reason.
    """

    micro_batch: int | None
    refused: int | None
    proven: bool
    measured: tuple[int, ...]
    failures: Mapping[int, str] = field(default_factory=dict)


def find_largest(
    fill: Callable[[int], float],
    sizes: Sequence[int],
    *,
    known: tuple[int, float] | None = None,
    most: int = MOST_MEASUREMENTS,
) -> LargestMicroBatch:
    """Search `sizes` (ascending) with at most `most` measurements; `known` is a size that was measured before.

    `fill` returns the peak over the limit of the fullest tier: up to 1 a micro batch fits.
    """
    seen: dict[int, float] = dict([known]) if known else {}
    while len(seen) - bool(known) < most and (size := _next(seen, sizes)) is not None:
        seen[size] = fill(size)
    fits, refused = _bracket(seen)
    proven = _next(seen, sizes) is None
    return LargestMicroBatch(micro_batch=fits, refused=refused, proven=proven, measured=tuple(seen))


def _bracket(seen: dict[int, float]) -> tuple[int | None, int | None]:
    """Return the largest size that fits below the smallest one that does not, and that one."""
    refused = min((size for size, full in seen.items() if full > 1), default=None)
    fitting = (size for size, full in seen.items() if full <= 1 and (refused is None or size < refused))
    return max(fitting, default=None), refused


def _next(seen: dict[int, float], sizes: Sequence[int]) -> int | None:
    """Return the size to measure next; None when the search is over."""
    fits, refused = _bracket(seen)
    left = [size for size in sizes if (fits is None or size > fits) and (refused is None or size < refused)]
    if not left:
        return None
    if fits is None:
        return left[0]
    target = _extrapolated(seen, fits) if refused is None else _interpolated(seen, fits, refused)
    return max((size for size in left if size <= target), default=left[0])


def _extrapolated(seen: dict[int, float], fits: int) -> float:
    """Return where the line through the two largest sizes reaches the limit; 8 times the size without a line."""
    before = max((size for size in seen if size < fits), default=None)
    slope = 0.0 if before is None else (seen[fits] - seen[before]) / (fits - before)
    return 8.0 * fits if slope <= 0 else min(fits + (1 - seen[fits]) / slope, 16.0 * fits)


def _interpolated(seen: dict[int, float], fits: int, refused: int) -> float:
    """Return where the peak should reach the limit, between a batch that fits and one that does not.

    The peak grows ever faster. The line from the size that fits to the one that does not reaches the limit too early.
    The line through two sizes that do not fit reaches it too late, unless the peak is linear there; where it says less
    than what fits, it is wrong. Where neither helps, the answer is the geometric middle.
    """
    beyond = min((size for size in seen if size > refused), default=None)
    if beyond is not None and math.isfinite(slope := (seen[beyond] - seen[refused]) / (beyond - refused)) and slope > 0:
        reached = refused - (seen[refused] - 1) / slope
        if reached > fits:
            return min(reached, refused - 1)
    chord = fits + (1 - seen[fits]) / (seen[refused] - seen[fits]) * (refused - fits)
    return chord if chord - fits > _NOTICEABLE * (refused - fits) else math.sqrt(fits * refused)
