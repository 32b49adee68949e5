"""The memory of a run over its steps: does a tier fill up, and at which step does it run out?"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..report.text import TIER_NAMES
from ..types import Tier
from ..units import format_bytes

WINDOW = 64  # measurements that a trend is taken from
_FEWEST = 32  # of them
_PARTS = 4  # of the window, which all have to grow
_SAY_AGAIN = 2.0  # the steps left are more or fewer by this factor than at the last warning


class TierReading(NamedTuple):
    """The bytes in use on a tier after an optimizer step, or its peak so far."""

    step: int
    used_bytes: int


class Trend(NamedTuple):
    """Steady growth. `runs_out_at` is the step after which nothing is left."""

    bytes_per_step: float
    headroom_bytes: int
    runs_out_at: int


def find_trend(window: Sequence[TierReading], limit_bytes: int) -> Trend | None:
    """Return the growth of a tier over these readings; None where there is none, or too few of them to tell.

    The slope is Theil–Sen's: the median over pairs, which single outliers do not move. It counts as growth only if
    all quarters of the window grow, and the last one not much less: a plateau, single jumps and noise do not.
    """
    if len(window) < _FEWEST:
        return None
    size = len(window) // _PARTS
    parts = [_slope(window[start : start + size]) for start in range(0, _PARTS * size, size)]
    if min(parts) <= 0:  # asked first: the slope of all has many more pairs
        return None
    slope = _slope(window)
    if slope <= 0 or parts[-1] < slope / 2:
        return None
    last = window[-1]
    level = statistics.median(point.used_bytes + slope * (last.step - point.step) for point in window)
    spread = statistics.median(abs(point.used_bytes + slope * (last.step - point.step) - level) for point in window)
    if slope * (last.step - window[0].step) < 4 * spread:  # the growth over the window is within its noise
        return None
    left = max(0.0, limit_bytes - level)
    return Trend(slope, int(left), last.step + math.ceil(left / slope))


def _slope(points: Sequence[TierReading]) -> float:
    """The median slope over all pairs of points, in bytes a step."""
    slopes = [
        (after.used_bytes - before.used_bytes) / (after.step - before.step)
        for index, before in enumerate(points)
        for after in points[index + 1 :]
        if after.step > before.step
    ]
    return statistics.median(slopes) if slopes else 0.0


@dataclass(slots=True, kw_only=True)
class WatchedTier:
    """One tier of a running attempt, of a `node` where there are several. `warned` is the step of the last warning."""

    tier: Tier
    limit_bytes: int
    node: str = ""
    readings: deque[TierReading] = field(default_factory=lambda: deque(maxlen=WINDOW))
    warned: int | None = None

    def add(self, reading: TierReading, *, last_step: int | None) -> str | None:
        """Take one more reading, and return a warning that is worth saying.

        `last_step` is the run's. A tier that lasts until then is no news. A trend is said once, and again when it has
        changed much.
        """
        self.readings.append(reading)
        trend = find_trend(tuple(self.readings), self.limit_bytes)
        if trend is None or (last_step is not None and trend.runs_out_at > last_step):
            return None
        if self.warned is not None:
            left, left_then = trend.runs_out_at - reading.step, max(1, self.warned - reading.step)
            if left_then / _SAY_AGAIN <= left <= left_then * _SAY_AGAIN:
                return None
        self.warned = trend.runs_out_at
        of_node = f" of node {self.node}" if self.node else ""
        return (
            f"{TIER_NAMES[self.tier]}{of_node} fills by {format_bytes(trend.bytes_per_step)} a step, and"
            f" {format_bytes(trend.headroom_bytes)} are left: it runs out at about step {trend.runs_out_at:,}"
        )
