"""Grow the micro batch of a config: what to try next, and when to stop."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from ..config.profiles import GrowLimits
from ..types import Failed, Fit, OutOfMemory, Record, Run, Steps, Trial, first_line
from ..units import format_bytes
from .forecasts import NO_FORECASTER, Forecaster
from .trials import (
    accumulation_for,
    fit_steps_to_budget,
    fits_within,
    micro_batches,
    run_with_retry,
    samples_per_second,
)

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


_WIDE = 2  # two micro batches this far apart, as a ratio, show what a sample costs; closer ones show noise
SURE = 0.85  # of a slope, for noise
_WORTH_GROWING = 1.02  # a gain that is worth a trial, if the bound were true


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


def promise(times: Mapping[int, float], *, most: float, sample_s: float) -> Promise:
    """The most that a config may reach with any micro batch up to `most`, by seconds of a micro step per micro batch.

    One more sample costs about `sample_s` or more, and never less than samples before it did: beyond the largest
    measured micro batch the seconds lie above the line through the last two.
    """
    if not times:
        return Promise(rate=math.inf)
    sizes = sorted(times)
    best = max(size / times[size] for size in sizes)
    up = _beyond(times, sizes, most, sample_s)
    return Promise(rate=max(best, up.rate), size=up.size if up.rate > best * _WORTH_GROWING else None)


def _beyond(times: Mapping[int, float], sizes: Sequence[int], most: float, sample_s: float) -> Promise:
    """Above the largest measured."""
    last = sizes[-1]
    if most <= last:
        return Promise(rate=0.0)
    flat = SURE * max(sample_s, last_sample_s(times))
    if math.isinf(most):
        return Promise(rate=math.inf if flat <= 0 else 1 / flat, size=2 * last)
    return Promise(rate=most / (times[last] + flat * (most - last)), size=int(most))


def _slope(times: Mapping[int, float], small: int, large: int) -> float:
    return (times[large] - times[small]) / (large - small)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """is_limit: larger micro batches do not run; otherwise the largest was not looked for any further."""

    is_limit: bool
    reason: str


def when_saturated(records: Sequence[Record], ground: Ground, sizes: Sequence[int], gain: float) -> Stop | None:
    """The last trial grew the micro batch twofold or more, and throughput by less than `gain`."""
    timed = {
        record.trial.knobs.micro_batch: samples_per_second(record)
        for record in records
        if isinstance(record.outcome, Fit)
    }
    last = records[-1].trial.knobs.micro_batch if records else 0
    before = well_below(timed, last)
    if before is None or last not in timed or timed[last] >= gain * timed[before]:
        return None
    most = sizes[-1] if ground.bad is None else ground.bad - 1
    most = max(ground.good, int(min(ground.allowed() or ground.good, most)))
    ratio = timed[last] / timed[before]
    return Stop(
        is_limit=False,
        reason=f"micro batch {last} is only {ratio:.2f} times as fast as {before}; memory would allow about {most}",
    )


def when_found(ground: Ground, sizes: Sequence[int], records: Sequence[Record], whole_share: int | None) -> Stop:
    """There is no micro batch left to try. whole_share: a rank's part of the global batch, if there is one."""
    usable = format_bytes(ground.usable_bytes)
    good = ground.good
    if ground.peaks[good] > ground.usable_bytes:
        return Stop(
            is_limit=True, reason=f"micro batch 1 already needs {format_bytes(ground.peaks[1])}, usable: {usable}"
        )
    if ground.bad is not None:
        last = [record for record in records if record.trial.knobs.micro_batch == ground.bad][-1]
        return Stop(is_limit=True, reason=f"micro batch {ground.bad} {what_happened(last, usable)}")
    if good == sizes[-1]:
        why = (
            "is a rank's whole share of the global batch" if good == whole_share else "is the largest that may be tried"
        )
        return Stop(is_limit=False, reason=f"micro batch {good} {why}")
    allowed, following = ground.allowed(), ground.between(sizes)[0]
    if allowed is None or (allowed >= following > LONGEST_JUMP * good):
        why = "is too far above to be foreseen"
        return Stop(is_limit=False, reason=f"{following}, the next divisor of a rank's share of the batch, {why}")
    return Stop(
        is_limit=True, reason=f"by the line through the measured peaks micro batch {int(allowed)} fills the {usable}"
    )


def when_spent(ground: Ground, most_trials: int) -> Stop:
    """The trials ran out before the gap was closed."""
    above = "" if ground.bad is None else f" and {ground.bad} does not"
    return Stop(is_limit=False, reason=f"all {most_trials} trials are spent: micro batch {ground.good} fits{above}")


def when_slow(micro_batch: int, seconds: float, budget_s: float) -> Stop:
    """Even the next size would take too long to be timed."""
    said = (
        f"a step of micro batch {micro_batch} would take about {seconds:.1f} s, more than the {budget_s:.1f} s that"
        " timing may take"
    )
    return Stop(is_limit=False, reason=said)


def step_seconds(records: Sequence[Record]) -> dict[int, float]:
    """Median seconds of an optimizer step by micro batch; the walk's one step is good enough to foresee by."""
    return {
        record.trial.knobs.micro_batch: median(record.outcome.step_s)
        for record in records
        if isinstance(record.outcome, Fit) and record.outcome.step_s
    }


def predicted_s(times: Mapping[int, float], micro_batch: int) -> float:
    """Seconds of a step by the line through the two largest measured micro batches.

    One point does not tell which part stays (nearly all, with an optimizer on the CPU): that is hopeful, half of it.
    So it is where noise hides that a step becomes longer: no line is believed that says less.
    """
    if not times:
        return 0.0
    largest = max(times)
    hopeful = times[largest] * max(1.0, micro_batch / largest / 2)
    if len(times) == 1:
        return hopeful
    before = sorted(times)[-2]
    each = max(0.0, (times[largest] - times[before]) / (largest - before))
    return max(hopeful, times[largest] + each * (micro_batch - largest))


def what_happened(record: Record, usable: str) -> str:
    """What a trial that is no good came to. usable: the memory that may be used, in words."""
    match record.outcome:
        case Fit(alloc_retries=int(retries)) if retries:
            return f"fits, but its allocator ran full {retries} times in the steps"
        case Fit() as fit:
            return f"needs {format_bytes(fit.device_peak_bytes)}, which does not leave the headroom (usable: {usable})"
        case OutOfMemory() as out:
            return f"ran out of {out.tier} memory"
        case Failed() as failure:
            return f"failed ({failure.failure}: {first_line(failure.evidence)}): this caps the micro batch only"


_FIRST_LOOK = 64  # micro batch
# Times as long as the shortest step: so long a step may take, even where that is more than its budget.
_LONGER_STEPS = 2
_WORTH_A_LONG_STEP = 1.15  # times the micro batch: less growth is not worth a trial whose steps are about too long
_SURELY_SLOWER = 1.5  # times; the walk times one step, after one that warms up
_AS_SURELY = 1.15  # times; where other trials hardly time more steps than that


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthRules:
    """What holds for every climb of a fit. grows: False leaves the micro batch at the smallest."""

    run: Run
    limits: GrowLimits
    steps: Steps
    usable_bytes: float
    world_size: int
    global_batch: int | None
    forecaster: Forecaster = NO_FORECASTER
    score: Callable[[Record], float] = samples_per_second
    grows: bool = True

    @property
    def sizes(self) -> Sequence[int]:
        """The micro batches that may be tried, ascending."""
        most = self.limits.most_micro_batch if self.grows else 1
        return micro_batches(self.global_batch, self.world_size, most)


@dataclass(slots=True, kw_only=True)
class Growth:
    """One config's climb.

    first: its trial at micro batch 1, or the smallest that can be trained. walked: that trial's record where it
    fitted; its steps hardly count as timed. records: what was measured since. stop: why the climb ended. like: trials
    of another config of the same model, by which the length of steps is guessed until they are measured.
    """

    rules: GrowthRules
    first: Trial
    walked: Record | None = None
    records: list[Record] = field(default_factory=list)
    stop: Stop | None = None
    like: Sequence[Record] = ()
    _foreseen: list[int | None] = field(default_factory=list)  # asked once: it costs a simulation

    @property
    def seen(self) -> tuple[Record, ...]:
        """All records, the walk's first."""
        return (*((self.walked,) if self.walked else ()), *self.records)

    @property
    def ground(self) -> Ground:
        """What is known of its memory; something must have fitted."""
        return survey(self.seen, self.rules.usable_bytes)

    def try_next(self) -> bool:
        """Run one more trial; False when there is nothing more to try, and `stop` says why."""
        choice = self._choose()
        if isinstance(choice, Stop):
            self.stop = choice
            return False
        self.measure(choice)
        return True

    def ends(self) -> None:
        """Climb to the end. The smallest is timed when nothing larger was, or when the smallest timed is fastest."""
        while self.stop is None and self.try_next():
            pass
        if self._worth_timing_the_first():
            self.measure(self.first.knobs.micro_batch)

    def extend(self, steps: Steps, trials: int) -> None:
        """Grow in up to `trials` more trials of these steps: where they may last longer, so may a step."""
        most = replace(self.rules.limits, most_trials=len(self.records) + trials)
        self.rules = replace(self.rules, steps=steps, limits=most)
        self.stop = None
        while self.stop is None and self.try_next():
            pass

    def measure(self, micro_batch: int) -> Record:
        """One micro batch, timed, with the global batch kept."""
        knobs = replace(self.first.knobs, micro_batch=micro_batch, accumulation=self.accumulation(micro_batch))
        steps = fit_steps_to_budget(self.rules.steps, self.expected_s(micro_batch), least=2)
        trial = replace(self.first, knobs=knobs, purpose="grow", steps=steps, repeat=0)
        self.records.extend(run_with_retry(trial, self.rules.run))
        return self.records[-1]

    def accumulation(self, micro_batch: int) -> int:
        """Micro batches a step: those that keep the global batch."""
        return accumulation_for(self.rules.global_batch, micro_batch, self.rules.world_size)

    def expected_s(self, micro_batch: int) -> float:
        """Seconds of a step, as far as can be said; 0 where nothing can."""
        return self.accumulation(micro_batch) * self._micro_step_s(micro_batch)

    def _micro_step_s(self, micro_batch: int) -> float:
        """The same of one of its micro batches."""
        times, like = micro_step_seconds(self.seen), micro_step_seconds(self.like)
        if len(times) == 1 and len(like) > 1:  # one point does not tell how steps grow: the same model's do
            ((size, seconds),) = times.items()
            return seconds * _along(like, micro_batch) / _along(like, size)
        return _along(times or like, micro_batch)

    @property
    def longest_step_s(self) -> float:
        """What a step may take at most to be timed. A large model's is long whatever the batch, so that is said in the
        shortest that is known, too, which is not this config's where it began with a large micro batch."""
        known = (*step_seconds(self.seen).values(), *step_seconds(self.like).values())
        return max(self.rules.steps.budget_s, _LONGER_STEPS * min(known, default=0.0))

    def forecast_limit(self) -> int | None:
        """The largest micro batch that the forecast lets in; None when it cannot say."""
        if not self._foreseen:
            knobs = replace(self.first.knobs, accumulation=self.accumulation(1))
            trial = replace(self.first, knobs=knobs, purpose="grow", steps=self.rules.steps, repeat=0)
            self._foreseen.append(self.rules.forecaster.largest(trial, self.rules.sizes, self.rules.usable_bytes))
        return self._foreseen[0]

    def eligible(self) -> list[Record]:
        """The timed trials that leave the headroom; micro batch 1 need not, since there is nothing smaller.

        Where timing failed although the walk's trial fitted, that one, with the global batch kept.
        """
        eligible = [
            record
            for record in self.records
            if isinstance(record.outcome, Fit)
            and (record.trial.knobs.micro_batch == 1 or fits_within(record, self.rules.usable_bytes))
        ]
        if eligible or self.walked is None:
            return eligible
        accumulation = accumulation_for(self.rules.global_batch, 1, self.rules.world_size)
        knobs = replace(self.walked.trial.knobs, accumulation=accumulation)
        return [replace(self.walked, trial=replace(self.walked.trial, knobs=knobs))]

    def best(self) -> Record | None:
        """The best of these."""
        return max(self.eligible(), key=self.rules.score, default=None)

    def _choose(self) -> int | Stop:
        """The next micro batch, or why the climb stops here."""
        rules, sizes, ground = self.rules, self.rules.sizes, self.ground
        if (stop := when_saturated(self.records, ground, sizes, rules.limits.gain)) is not None:
            return stop
        size = self._foreseen_first(ground) or next_size(ground, sizes)
        if size is None:
            share = None if rules.global_batch is None else rules.global_batch // rules.world_size
            return when_found(ground, sizes, self.records, share)
        if len(self.records) >= rules.limits.most_trials:
            return when_spent(ground, rules.limits.most_trials)
        if rules.global_batch is not None:
            return size  # a step has the same samples at every micro batch: growing never makes it much slower
        budget_s = self.longest_step_s
        open_sizes = ground.between(sizes)
        quick = [one for one in open_sizes if one <= size and self._micro_step_s(one) <= budget_s]
        if quick and (quick[-1] == size or quick[-1] >= _WORTH_A_LONG_STEP * ground.good):
            return quick[-1]
        slow = next(one for one in open_sizes if one not in quick)
        return when_slow(slow, self._micro_step_s(slow), budget_s)

    def _foreseen_first(self, ground: Ground) -> int | None:
        """The forecast's micro batch: to begin with, and as long as measured peaks say nothing of how they grow."""
        if self.records and (not self._foreseen or not math.isinf(ground.allowed() or 0.0)):
            return None
        most = self.forecast_limit() or 0
        if not self.records and self.rules.global_batch is None:
            most = min(most, _FIRST_LOOK)  # a thousand samples may fit, and speed have come to its end at twenty
        return max((size for size in ground.between(self.rules.sizes) if size <= most), default=None)

    def _worth_timing_the_first(self) -> bool:
        timed = [record for record in self.records if fits_within(record, self.rules.usable_bytes)]
        if not timed:
            return True
        best = max(timed, key=self.rules.score)
        fastest = best.trial.knobs.micro_batch
        if self._walked_was_slower(best):
            return False
        smallest = min(record.trial.knobs.micro_batch for record in timed)
        return fastest == smallest > self.first.knobs.micro_batch and len(self.records) < self.rules.limits.most_trials

    def _walked_was_slower(self, best: Record) -> bool:
        """Whether the walk's short look at micro batch 1 says enough. With a global batch it took fewer micro batches
        a step than growing does, and its samples paid more of what a step costs."""
        if self.walked is None or self.rules.global_batch is not None:
            return False
        sure = _AS_SURELY if self.rules.steps.most_timed <= 2 else _SURELY_SLOWER
        return sure * samples_per_second(self.walked) < samples_per_second(best)


def _along(times: Mapping[int, float], micro_batch: int) -> float:
    """Seconds of a step: as measured, between two that were, or beyond; 0 where nothing is known."""
    if micro_batch in times or not times:
        return times.get(micro_batch, 0.0)
    below, above = [size for size in times if size < micro_batch], [size for size in times if size > micro_batch]
    if not above:
        return predicted_s(times, micro_batch)
    right = min(above)
    if not below:
        return times[right] * micro_batch / right
    left = max(below)
    return times[left] + (times[right] - times[left]) * (micro_batch - left) / (right - left)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthResult:
    """What growing found.

    best: the fastest timed trial. largest_micro_batch: the largest seen to fit with the headroom.
    largest_is_limit: larger ones do not run; otherwise growing stopped for another `reason`, a sentence.
    """

    best: Record
    records: tuple[Record, ...]
    largest_micro_batch: int
    largest_is_limit: bool
    reason: str


def grow(winner: Record, rules: GrowthRules) -> GrowthResult:
    """Grow from the walk's winner (micro batch 1, not timed) within the usable memory of the device.

    It begins at the micro batch that the forecast lets in, and goes on by what trials measure.
    """
    return growth_result(grow_fully(winner, rules))


def grow_fully(winner: Record, rules: GrowthRules) -> Growth:
    """The climb of the walk's winner, ended."""
    growth = Growth(rules=rules, first=winner.trial, walked=winner)
    growth.ends()
    return growth


def growth_result(growth: Growth) -> GrowthResult:
    """What a climb that ended with something that fits has found."""
    best = growth.best()
    assert best is not None
    assert growth.stop is not None
    return GrowthResult(
        best=best,
        records=tuple(growth.records),
        largest_micro_batch=growth.ground.good,
        largest_is_limit=growth.stop.is_limit,
        reason=growth.stop.reason,
    )
