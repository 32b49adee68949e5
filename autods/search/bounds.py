"""How fast could a config still become with a larger micro batch? An upper bound, from what its steps took."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ..values import Fit, Record

_WIDE = 2  # two micro batches this far apart, as a ratio, show what a sample costs; closer ones show noise
# Rungs run the same model on the same device, so a sample costs them all about the same arithmetic; recomputing its
# activations is a quarter of it. What is taken of the cheapest measured leaves room for that and for noise.
_SURE = 0.6
_CLIFF = 1.25  # what a smaller micro batch may gain where the large ones lie behind one
_WORTH_HALVING = 4  # below, a smaller micro batch is not worth a trial


def micro_step_seconds(records: Iterable[Record]) -> dict[int, float]:
    """Micro batch → seconds of forward, backward and its share of the optimizer step; the fastest where repeated."""
    found: dict[int, float] = {}
    for record in records:
        if isinstance(record.outcome, Fit) and record.outcome.step_s:
            knobs = record.trial.knobs
            seconds = median(record.outcome.step_s) / knobs.accumulation
            found[knobs.micro_batch] = min(seconds, found.get(knobs.micro_batch, math.inf))
    return found


def least_sample_s(climbs: Iterable[Iterable[Record]]) -> float:
    """Seconds that one more sample must cost any config, at least; 0 where no climb shows it."""
    slopes = []
    for records in climbs:
        times = micro_step_seconds(records)
        if times and (large := max(times)) >= _WIDE * (small := min(times)):
            slopes.append((times[large] - times[small]) / (large - small))
    return max(0.0, _SURE * min(slopes, default=0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What a config may still reach: samples a second of a rank, and the micro batch to measure for it.

    size: None where nothing is left to measure that would tell more.
    """

    rate: float
    size: int | None = None


def promise(times: Mapping[int, float], *, most: float, sample_s: float) -> Promise:
    """The most that a config may reach with any micro batch up to `most`, by seconds of a micro step per micro batch.

    One more sample costs at least `sample_s`, and never less than samples before it did: the seconds are convex in the
    micro batch. So between two measured sizes they lie above the lines through their outer neighbours, and beyond the
    largest above the last one. Where a line lacks its neighbour there may be a cliff, which is taken to be no deeper
    than `_CLIFF`.
    """
    if not times:
        return Promise(rate=math.inf)
    sizes = sorted(times)
    best = Promise(rate=max(size / times[size] for size in sizes))
    found = [_before(times, sizes)]
    found += [_between(times, sizes, place, sample_s) for place in range(1, len(sizes))]
    found.append(_beyond(times, sizes, most, sample_s))
    return max((best, *found), key=lambda one: one.rate)


def _before(times: Mapping[int, float], sizes: Sequence[int]) -> Promise:
    """Below the smallest measured."""
    first = sizes[0]
    if first < _WORTH_HALVING:
        return Promise(rate=0.0)
    return Promise(rate=_CLIFF * first / times[first] if len(sizes) == 1 else 0.0, size=first // 2)


def _between(times: Mapping[int, float], sizes: Sequence[int], place: int, sample_s: float) -> Promise:
    left, right = sizes[place - 1], sizes[place]
    if right < 2 * left or right - left < 2:
        return Promise(rate=0.0)
    flat = sample_s
    if place >= 2:
        flat = max(flat, _SURE * (times[left] - times[sizes[place - 2]]) / (left - sizes[place - 2]))
    middle = math.sqrt(left * right)
    if place + 1 < len(sizes):
        steep = (times[sizes[place + 1]] - times[right]) / (sizes[place + 1] - right)
        if steep > flat:
            crossing = (times[right] - steep * right - times[left] + flat * left) / (flat - steep)
            middle = min(max(crossing, left + 1), right - 1)
        seconds = max(times[left] + flat * (middle - left), times[right] - steep * (right - middle))
        rate = middle / max(seconds, 1e-12)
    else:
        rate = right / (times[left] + flat * (right - left))
    known = max(left / times[left], right / times[right])
    return Promise(rate=min(rate, _CLIFF * known), size=int(middle))


def _beyond(times: Mapping[int, float], sizes: Sequence[int], most: float, sample_s: float) -> Promise:
    last = sizes[-1]
    if most <= last:
        return Promise(rate=0.0)
    flat = sample_s
    if len(sizes) > 1:
        before = sizes[-2]
        flat = max(flat, _SURE * (times[last] - times[before]) / (last - before))
    if math.isinf(most):
        return Promise(rate=math.inf if flat <= 0 else 1 / flat, size=2 * last)
    return Promise(rate=most / (times[last] + flat * (most - last)), size=int(most))
