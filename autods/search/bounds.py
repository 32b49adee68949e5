"""How fast could a config still become with a larger micro batch? An upper bound, from what its steps took."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ..outcomes import Fit
from ..values import Record

_WIDE = 2  # two micro batches this far apart, as a ratio, show what a sample costs; closer ones show noise
SURE = 0.85  # of a slope, for noise
_STEEP = 2.0  # what samples behind a cliff may cost, where it was not measured
_CLIFF = 1.25  # what a smaller micro batch may gain where only a large one was measured
_WORTH_HALVING = 4  # below, a smaller micro batch is not worth a trial
_WORTH_GROWING, _WORTH_LOOKING = 1.02, 1.10  # gains that are worth a trial, if the bound were true


def micro_step_seconds(records: Iterable[Record], *, updates: bool = True) -> dict[int, float]:
    """Micro batch → seconds of forward, backward and its share of the optimizer step; the fastest where repeated.

    updates: with what the optimizer takes; else without, as far as a trial saw that.
    """
    found: dict[int, float] = {}
    for record in records:
        if isinstance(record.outcome, Fit) and record.outcome.step_s:
            knobs = record.trial.knobs
            without = 0.0 if updates else record.outcome.timing.update_share or 0.0
            seconds = median(record.outcome.step_s) * (1 - without) / knobs.accumulation
            found[knobs.micro_batch] = min(seconds, found.get(knobs.micro_batch, math.inf))
    return found


def least_sample_s(climbs: Iterable[Iterable[Record]]) -> float:
    """Seconds that one more sample costs, by the cheapest climb; 0 where none shows it.

    Rungs run the same model on the same device, so a sample costs them all about the same arithmetic.
    """
    slopes = []
    for records in climbs:
        times = micro_step_seconds(records)
        if times and (large := max(times)) >= _WIDE * (small := min(times)):
            slopes.append(_slope(times, small, large))
    return max(0.0, min(slopes, default=0.0))


def well_below(sizes: Iterable[int], size: int) -> int | None:
    """The largest micro batch that is far enough below this one for the two to show what a sample costs."""
    return max((one for one in sizes if size >= _WIDE * one), default=None)


def last_sample_s(times: Mapping[int, float]) -> float:
    """Seconds that one more sample costs at the largest micro batch measured; 0 where nothing shows it."""
    last = max(times)
    before = well_below(times, last)
    return 0.0 if before is None else _slope(times, before, last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What a config may still reach: samples a second of a rank, and the micro batch to measure for it.

    size: None where nothing is left to measure that would tell more.
    """

    rate: float
    size: int | None = None


def promise(
    times: Mapping[int, float], *, most: float, sample_s: float, allowed: Sequence[int] | None = None
) -> Promise:
    """The most that a config may reach with any micro batch up to `most`, by seconds of a micro step per micro batch.

    One more sample costs about `sample_s` or more, and never less than samples before it did: the seconds are convex in
    the micro batch. So beyond the largest measured they lie above the line through the last two, and between two sizes
    above the lines through their outer neighbours. Upwards goes before between: there the rate is known to rise.
    allowed: the micro batches that may be tried; where none of them lies, nothing is promised.
    """
    if not times:
        return Promise(rate=math.inf)
    sizes = sorted(times)
    best = max(size / times[size] for size in sizes)
    up = _offered(_beyond(times, sizes, most, sample_s), sizes, allowed)
    inside = [_before(times, sizes)]
    inside += [_between(times, sizes, place, sample_s) for place in range(1, len(sizes))]
    inside = [_offered(one, sizes, allowed) for one in inside]
    deepest = max(inside, key=lambda one: one.rate)
    size = up.size if up.rate > best * _WORTH_GROWING else None
    if size is None and deepest.rate > best * _WORTH_LOOKING:
        size = deepest.size
    return Promise(rate=max(best, up.rate, deepest.rate), size=size)


def _offered(one: Promise, known: Sequence[int], allowed: Sequence[int] | None) -> Promise:
    """The promise, if a micro batch that may be tried lies where it was made: between the same measured sizes."""
    if one.size is None or allowed is None:
        return one
    below = max((size for size in known if size <= one.size), default=0)
    above = min((size for size in known if size > one.size), default=math.inf)
    between = bisect_right(allowed, below) < (len(allowed) if math.isinf(above) else bisect_left(allowed, above))
    return one if between else Promise(rate=0.0)


def _beyond(times: Mapping[int, float], sizes: Sequence[int], most: float, sample_s: float) -> Promise:
    """Above the largest measured."""
    last = sizes[-1]
    if most <= last:
        return Promise(rate=0.0)
    flat = SURE * max(sample_s, last_sample_s(times))
    if math.isinf(most):
        return Promise(rate=math.inf if flat <= 0 else 1 / flat, size=2 * last)
    return Promise(rate=most / (times[last] + flat * (most - last)), size=int(most))


def _before(times: Mapping[int, float], sizes: Sequence[int]) -> Promise:
    """Below the only one measured: there may be a cliff before it."""
    if len(sizes) > 1 or sizes[0] < _WORTH_HALVING:
        return Promise(rate=0.0)
    return Promise(rate=_CLIFF * sizes[0] / times[sizes[0]], size=sizes[0] // 2)


def _between(times: Mapping[int, float], sizes: Sequence[int], place: int, sample_s: float) -> Promise:
    """Where a cliff may lie between two sizes: at the crossing of the line before it and the line behind it."""
    left, right = sizes[place - 1], sizes[place]
    if right < _WIDE * left or right - left < 2:
        return Promise(rate=0.0)
    flat = SURE * sample_s
    if place >= 2:
        flat = max(flat, SURE * _slope(times, sizes[place - 2], left))
    steep = max(_STEEP * sample_s, _CLIFF * _slope(times, left, right))
    if place + 1 < len(sizes):
        steep = _slope(times, right, sizes[place + 1])
    if steep <= flat:
        return Promise(rate=0.0)
    crossing = (times[right] - times[left] + flat * left - steep * right) / (flat - steep)
    size = min(max(int(crossing), left + 1), right - 1)
    seconds = max(times[left] + flat * (size - left), times[right] - steep * (right - size))
    return Promise(rate=size / max(seconds, 1e-12), size=size)


def _slope(times: Mapping[int, float], small: int, large: int) -> float:
    return (times[large] - times[small]) / (large - small)
