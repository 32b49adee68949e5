"""Where growing may begin small and end early: what a larger micro batch could still gain, by the measured steps.

One more sample never costs less than those before it did, so longer steps lie above the line through two that were
measured. The walk's step is rather too long than too short, which makes the line flatter and the bound higher.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..outcomes import Fit
from ..values import Record, Steps
from .ask import step_s_of
from .bounds import well_below
from .stopping import Stop

_HALVINGS = 30
_LITTLE = 1.5  # times as fast


def when_little_is_left(times: Mapping[int, float], last: int, longest_s: float, worth: float) -> Stop | None:
    """No micro batch beyond the last one tried can be `worth` times as fast. times: seconds of a micro step;
    longest_s: what a step may take."""
    smaller = well_below(times, last)
    if smaller is None or last not in times or times[last] >= longest_s:
        return None
    most = most_to_gain(smaller, times[smaller], last, times[last], longest_s)
    if most >= worth:
        return None
    faster = f"more than {most - 1:.0%} faster" if most >= 1.005 else "faster"
    return Stop(
        is_limit=False, reason=f"by the steps of micro batch {smaller} and {last} no larger one can be {faster} in time"
    )


def next_look(times: Mapping[int, float], last: int, longest_s: float) -> float:
    """How large the next micro batch may be at most: where little is left to gain, twice the last one shows it, in
    trials that are not longer than they need be."""
    smaller = well_below(times, last)
    if smaller is None or last not in times:
        return math.inf
    return 2 * last if most_to_gain(smaller, times[smaller], last, times[last], longest_s) < _LITTLE else math.inf


def last_from_s(times: Mapping[int, float], size: int, longest_s: float, worth: float) -> float | None:
    """Seconds of a step of `size` from which on it is the last one tried; None where that cannot be said before."""
    smaller = well_below(times, size)
    if smaller is None or size < max(times):
        return None
    low, high = times[smaller], max(times[smaller], longest_s)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if most_to_gain(smaller, times[smaller], size, middle, longest_s) < worth:
            high = middle
        else:
            low = middle
    return high


def most_to_gain(small: int, small_s: float, size: int, size_s: float, longest_s: float) -> float:
    """How many times as fast as `size` a larger micro batch can be whose step takes at most `longest_s`."""
    each = (size_s - small_s) / (size - small)
    if each <= 0:
        return math.inf
    most = size + max(0.0, longest_s - size_s) / each
    return (most / max(longest_s, size_s)) / (size / size_s)


def is_mostly_steps(walked: Record | None, steps: Steps, micro_batch: int) -> bool:
    """Whether a trial of this micro batch is mostly steps, if each sample costs what that of the walk did: then steps
    are what a search spends its time on, and not what surrounds them, and larger batches cost that much more of it."""
    if walked is None or not isinstance(walked.outcome, Fit):
        return False
    beside_s = walked.seconds - walked.outcome.timing.steps_s
    return (steps.warmup + steps.timed) * micro_batch * step_s_of(walked) >= beside_s
