"""When a search has found enough: by what was told so far alone, so that a killed search stops where it would have."""

from __future__ import annotations

from collections.abc import Sequence


def patience(dimensions: int) -> int:
    """How many trials in a row may gain nothing."""
    return 8


def enough(scores: Sequence[float | None], gain: float, dimensions: int) -> bool:
    """Whether the last trials together gained less than the share `gain`. None: it did not fit."""
    wait = patience(dimensions)
    before = [one for one in scores[:-wait] if one is not None]
    if not before or gain <= 0:
        return False
    return max(one for one in (*before, *scores[-wait:]) if one is not None) < max(before) * (1 + gain)
