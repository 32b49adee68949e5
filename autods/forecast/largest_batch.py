"""The search for the largest micro batch that fits, by the fill of the fullest tier."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

MOST_MICRO_BATCH = 4096
MOST_MEASUREMENTS = 10


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


Fills = Mapping[str, float]  # shares of limits by tier or phase; a micro batch fits where each is up to 1


def find_largest(
    fill: Callable[[int], Fills],
    sizes: Sequence[int],
    *,
    known: tuple[int, Fills] | None = None,
    most: int = MOST_MEASUREMENTS,
) -> LargestMicroBatch:
    """Search `sizes` (ascending) with at most `most` measurements; `known` is a size that was measured before.

    `fill` returns the peaks over their limits, of the tiers and of the phases: each grows by a line of its own.
    """
    seen: dict[int, Fills] = dict([known]) if known else {}
    while len(seen) - bool(known) < most and (size := _next(seen, sizes)) is not None:
        seen[size] = fill(size)
    fits, refused = _bracket(seen)
    proven = _next(seen, sizes) is None
    return LargestMicroBatch(micro_batch=fits, refused=refused, proven=proven, measured=tuple(seen))


def find_last(sizes: Sequence[int], is_too_large: Callable[[int], bool]) -> int | None:
    """Return the last of these micro batches (ascending) before the first that is too large; None without one."""
    if not sizes or not is_too_large(sizes[-1]):
        return max(sizes, default=None)
    return None if is_too_large(sizes[0]) else sizes[bisect_left(sizes, True, key=is_too_large) - 1]


def _bracket(seen: Mapping[int, Fills]) -> tuple[int | None, int | None]:
    """Return the largest size that fits below the smallest one that does not, and that one."""
    refused = min((size for size, fills in seen.items() if max(fills.values()) > 1), default=None)
    fitting = (size for size, fills in seen.items() if max(fills.values()) <= 1 and (refused is None or size < refused))
    return max(fitting, default=None), refused


def _next(seen: Mapping[int, Fills], sizes: Sequence[int]) -> int | None:
    """Return the size to measure next; None when the search is over."""
    fits, refused = _bracket(seen)
    left = [size for size in sizes if (fits is None or size > fits) and (refused is None or size < refused)]
    if not left:
        return None
    if fits is None:
        return left[0]
    target = _extrapolated(seen, fits) if refused is None else _interpolated(seen, fits, refused)
    return max((size for size in left if size <= target), default=left[0])


def _extrapolated(seen: Mapping[int, Fills], fits: int) -> float:
    """Return where the first of the lines through the two largest sizes reaches its limit.

    That is at most 16 times the size; 8 times without a line.
    """
    before = max((size for size in seen if size < fits), default=None)
    if before is None:
        return 8.0 * fits
    lines = [(now, (now - seen[before].get(part, now)) / (fits - before)) for part, now in seen[fits].items()]
    reached = [fits + (1 - now) / slope for now, slope in lines if slope > 0]
    return min(*reached, 16.0 * fits) if reached else 8.0 * fits


def _interpolated(seen: Mapping[int, Fills], fits: int, refused: int) -> float:
    """Return where the peak should reach the limit, between a batch that fits and one that does not.

    The peak grows ever faster. So the line from the size that fits to the one that does not reaches the limit too
    early. A line through two sizes that fit, or through two that do not, reaches it too late. The result is the
    geometric middle, since fragments make the peak uneven, and either line may be wrong.
    """
    peak = {size: max(fills.values()) for size, fills in seen.items()}
    chord = fits + (1 - peak[fits]) / (peak[refused] - peak[fits]) * (refused - fits)
    late = [float(refused), _extrapolated(seen, fits)]
    beyond = min((size for size in seen if size > refused), default=None)
    if beyond is not None and math.isfinite(slope := (peak[beyond] - peak[refused]) / (beyond - refused)) and slope > 0:
        late.append(refused - (peak[refused] - 1) / slope)
    return math.sqrt(chord * min(place for place in late if place >= chord))
