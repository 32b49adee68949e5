"""Grow the micro batch of a config: the size to try next, and the reason to stop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..forecast.largest_batch import find_last
from ..types import Failed, Fit, Outcome, Purpose, Record, Steps, Trial
from ..units import format_bytes, format_factor
from .batch_curve import LONGEST_JUMP, SURE, WORTH_GROWING, BatchCurve, well_below
from .certificate import describe_exam
from .prospects import MOST_AT_FIRST
from .trials import FitContext, fit_steps_to_budget, median_step_s, run_with_retry, samples_per_second

LONGER_STEPS = 4  # a step may take so many times the shortest one, even where that exceeds the trial's budget
_NEAR = 1.25  # ratio of micro batches up to which a forecast that erred is asked again
_WORTH_A_LONG_STEP = 1.15  # ratio of micro batches below which a trial with steps near the longest is not worth it


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthEnd:
    """Why growth ended. `is_limit`: larger micro batches do not run; otherwise none was tried."""

    is_limit: bool
    reason: str


@dataclass(slots=True, kw_only=True)
class Growth:
    """The growth of one config, trial by trial, in up to `most_trials` trials of these `steps`.

    `first` is its trial at the smallest micro batch that the model can be trained with.
    `walked` is the record of that trial if it fitted; it has too few steps to count as timed.
    `records` are the trials of growth.
    `like` are trials of another config of the same model. They give the step time until this config has measured one.
    """

    context: FitContext
    first: Trial
    most_trials: int
    steps: Steps
    walked: Record | None = None
    records: list[Record] = field(default_factory=list)
    stop: GrowthEnd | None = None
    like: Sequence[Record] = ()
    _forecast_limits: list[int | None] = field(default_factory=list)  # computed once: it costs a simulation

    @property
    def all_records(self) -> tuple[Record, ...]:
        """The walk's record first."""
        return (*((self.walked,) if self.walked else ()), *self.records)

    @property
    def curve(self) -> BatchCurve:
        """Its measurements; at least one trial has fitted."""
        return BatchCurve.from_records(self.all_records, self.context.usable_bytes, self.context.sizes[0])

    # Trials

    def run(self) -> Growth:
        """Grow until `stop` is set or the budget is spent. Then time the smallest size where no other left headroom."""
        while self.stop is None and (not self.records or self.context.may_run(1)) and self.try_next():
            pass
        if not any(self.context.fits(record) for record in self.records):
            self.measure(self.context.sizes[0])
        return self

    def extend(self, steps: Steps, trials: int) -> None:
        """Grow in up to `trials` more trials of these steps. With a larger time budget, a step may last longer."""
        self.steps, self.most_trials, self.stop = steps, self._sizes_tried() + trials, None
        while self.stop is None and self.try_next():
            pass

    def try_next(self) -> bool:
        """Run one more trial. False when no size is left to try; `stop` then has the reason."""
        choice = self._choose()
        if isinstance(choice, GrowthEnd):
            self.stop = choice
            return False
        self.measure(choice)
        return True

    def measure(self, micro_batch: int, purpose: Purpose = "grow") -> Record:
        """Time one micro batch at the fit's global batch."""
        trial = replace(self.trial_at(micro_batch), purpose=purpose)
        step_s = self._step_at(micro_batch)
        same_size = (record.trial.repeat for record in self.records if record.trial.knobs.micro_batch == micro_batch)
        repeat = 1 + max(same_size, default=-1)
        least = 2 if step_s < self.steps.budget_s else 1  # the noise of a step that takes the whole budget is small
        trial = replace(trial, steps=fit_steps_to_budget(self.steps, step_s, least=least), repeat=repeat)
        self.records.extend(run_with_retry(trial, self.context.run))
        return self.records[-1]

    def measure_near(self, size: int) -> bool:
        """Measure a micro batch near `size`, or as far above the measured ones as is safe. False: none is left."""
        if size >= self.curve.fits:
            return self.stop is None and self.try_next()
        measured = {record.trial.knobs.micro_batch for record in self.all_records}
        below = max((other for other in measured if other <= size), default=0)
        above = min((other for other in measured if other > size), default=math.inf)
        sizes = [other for other in self.context.sizes if below < other < above]
        if not sizes:
            return False
        self.measure(max((other for other in sizes if other <= size), default=sizes[0]))
        return True

    def trial_at(self, micro_batch: int) -> Trial:
        """The trial that times this micro batch."""
        knobs = self.context.resize(self.first.knobs, micro_batch)
        return replace(self.first, knobs=knobs, purpose="grow", steps=self.steps, repeat=0)

    # Results

    def eligible(self) -> list[Record]:
        """The timed trials that leave the headroom; the smallest micro batch need not, because nothing is smaller.

        Where every timed trial failed, the walk's trial with the fit's global batch stands in.
        """
        smallest, curve = self.context.sizes[0], self.curve
        eligible = []
        for record in self.records:
            is_smallest = record.trial.knobs.micro_batch == smallest and isinstance(record.outcome, Fit)
            if is_smallest or curve.leaves_headroom(record):
                eligible.append(record)
        if eligible or self.walked is None:
            return eligible
        knobs = self.context.resize(self.walked.trial.knobs, self.walked.trial.knobs.micro_batch)
        return [replace(self.walked, trial=replace(self.walked.trial, knobs=knobs))]

    def best(self) -> Record | None:
        """The eligible trial with the highest score."""
        return max(self.eligible(), key=self.context.score, default=None)

    def explain_end(self, sample_s: float) -> GrowthEnd:
        """Why its growth ended: the reason to stop, or the micro batch that promised too little, or came too late.

        `sample_s` are the seconds that one more sample takes at least.
        """
        choice, curve = self._choose(), self.curve
        if isinstance(choice, GrowthEnd):
            return choice
        if choice not in curve.peak_bytes and curve.fits in curve.micro_step_s:
            measured, bound = (curve.throughput_bound(most, sample_s).rate for most in (curve.fits, choice))
            gain = bound / measured
            if gain < WORTH_GROWING:
                reason = f"by its step times micro batch {choice} is at most {format_factor(gain)} times as fast"
                return GrowthEnd(is_limit=False, reason=reason)
        again = " again" if any(record.trial.knobs.micro_batch == choice for record in self.records) else ""
        return GrowthEnd(is_limit=False, reason=f"the race ended before micro batch {choice} was measured{again}")

    # Limits

    @property
    def longest_step_s(self) -> float:
        """The seconds that a step may take. Where even the shortest step of the model is long, four times that time."""
        known = [seconds for record in (*self.all_records, *self.like) if (seconds := median_step_s(record))]
        return max(self.steps.budget_s, LONGER_STEPS * min(known, default=0.0))

    def forecast_limit(self) -> int | None:
        """The largest micro batch that should fit by the forecast; None when unknown."""
        if not self._forecast_limits:
            context = self.context
            largest = context.forecaster.largest(self.trial_at(context.sizes[0]), context.sizes, context.usable_bytes)
            self._forecast_limits.append(largest)
        return self._forecast_limits[0]

    def most_by_memory(self) -> float:
        """The largest micro batch by its measured peaks, else by its forecast."""
        if not self.all_records:
            return math.inf
        curve, largest = self.curve, self.context.sizes[-1]
        limit = curve.line_limit()
        if limit is None or math.isinf(limit):
            forecast = self.forecast_limit()
            limit = largest if forecast is None else max(forecast, curve.fits, self._most_by_rise() or 0)
        return min(largest, limit, math.inf if curve.too_large is None else curve.too_large - 1)

    def most_by_time(self, sample_s: float) -> float:
        """The largest micro batch whose step is short enough to be timed, at `sample_s` seconds a sample."""
        times = self.curve.micro_step_s
        if self.context.settings.global_batch is not None or not times or sample_s <= 0:
            return math.inf
        size = max(times)
        longest_s = self.longest_step_s / self.first.knobs.accumulation  # of a micro step
        return max(size, size + (longest_s - times[size]) / (SURE * sample_s))

    def _step_at(self, micro_batch: int) -> float:
        """Seconds of an optimizer step, by the forecast where nothing is measured; 0 where nothing is known."""
        curve, trial = self._time_curve(), self.trial_at(micro_batch)
        if not curve.micro_step_s and (step := self.context.forecaster.step_time(trial)) is not None:
            return step.seconds
        return curve.micro_step_at(micro_batch) * trial.knobs.accumulation

    def _most_step_at(self, micro_batch: int) -> float:
        """Seconds that an optimizer step may take.

        One timed size does not tell which part of a step grows with the batch. The forecast does. Without it all may:
        a trial of steps that are twice as long as they may be costs minutes.
        """
        times = self._time_curve().micro_step_s
        if len(times) != 1:
            return self._step_at(micro_batch)
        ((size, seconds),) = times.items()
        forecaster, trial, timed = self.context.forecaster, self.trial_at(micro_batch), self.trial_at(size)
        growth = micro_batch / size
        if (longer := forecaster.step_time(trial)) is not None and (known := forecaster.step_time(timed)) is not None:
            growth = longer.seconds / known.seconds
        return seconds * max(1.0, growth) * trial.knobs.accumulation

    def _time_curve(self) -> BatchCurve:
        """The step times of this config, or of the one that is like it until this one has measured one."""
        return self.curve if self.curve.micro_step_s else BatchCurve.from_records(self.like)

    # Decisions

    def _choose(self) -> int | GrowthEnd:
        """The next micro batch, or the reason to stop."""
        sizes, curve, global_batch = self.context.sizes, self.curve, self.context.settings.global_batch
        if (choice := self._check_gain(curve)) is not None:
            return choice
        if self._sizes_tried() < self.most_trials and (calm := self._find_calm_size()) is not None:
            return calm
        size = curve.next_size(sizes)
        if len(curve.peak_bytes) <= 1 and curve.too_large is None:  # the forecast knows better than one peak alone
            most = self.forecast_limit() or 0
            if not self.records and global_batch is None:
                most = min(most, MOST_AT_FIRST)
            size = max((other for other in curve.open_sizes(sizes) if other <= most), default=size)
        if size is None:
            return self._stop_without_size(curve)
        if self.records:
            if isinstance(choice := self._check_forecast(size), GrowthEnd):
                return choice
            size = choice
        if curve.too_large is None and self._sizes_tried() >= self.most_trials:
            fits = f"micro batch {curve.fits} fits, and no larger one was tried"
            return GrowthEnd(is_limit=False, reason=f"all {self.most_trials} trials are spent: {fits}")
        if global_batch is not None:
            return size  # a step has the same samples at every micro batch, so growth makes it hardly longer
        longest_s = self.longest_step_s
        open_sizes = curve.open_sizes(sizes)
        up_to_size = [other for other in open_sizes if other <= size]
        most_short = find_last(up_to_size, lambda other: self._most_step_at(other) > longest_s)
        if most_short is not None and (most_short == size or most_short >= _WORTH_A_LONG_STEP * curve.fits):
            return most_short
        long = next(other for other in open_sizes if most_short is None or other > most_short)
        return GrowthEnd(
            is_limit=False,
            reason=f"a step of micro batch {long} would take about {self._most_step_at(long):.1f} s, more than the"
            f" {longest_s:.1f} s that timing may take",
        )

    def _check_gain(self, curve: BatchCurve) -> int | GrowthEnd | None:
        """The micro batch to measure again because the last one seems too slow, a stop, or None to go on.

        Growth stops where the last size gained too little over one at most half as large. Other work on the machine can
        hide a gain. So the last size is timed twice before that, and a smaller one that seems faster, too. Where
        repeats differ by more than the profile's noise, a gain counts that is smaller by as much.
        """
        rates: dict[int, list[float]] = {}
        for record in self.records:
            if self.context.fits(record):
                rates.setdefault(record.trial.knobs.micro_batch, []).append(samples_per_second(record))
        best = {size: max(repeats) for size, repeats in rates.items()}
        if self.walked is not None:
            best.setdefault(self.walked.trial.knobs.micro_batch, samples_per_second(self.walked))
        last = next((record.trial.knobs.micro_batch for record in reversed(self.records) if not record.trial.repeat), 0)
        smaller = [size for size in best if size < last]
        if last not in rates or not smaller:
            return None
        profile, noise = self.context.settings.profile, self.context.noise
        gain = profile.grow.gain * (1 - noise if noise > profile.race.noise else 1)
        fastest, before = max(smaller, key=lambda size: best[size]), well_below(smaller, last)
        is_slower = best[last] < (1 - profile.race.noise) * best[fastest]
        is_saturated = before is not None and best[last] < gain * best[before]
        if not (is_slower or is_saturated):
            return None
        if len(rates[last]) < 2:
            return last
        if is_slower and len(rates.get(fastest, [])) < 2:
            return fastest
        if before is None or not is_saturated:
            return None
        if before not in rates:
            return before
        reason = f"micro batch {last} is only {format_factor(best[last] / best[before])} times as fast as {before}"
        most = min(curve.line_limit() or math.inf, self.context.sizes[-1], (curve.too_large or math.inf) - 1)
        return GrowthEnd(is_limit=False, reason=f"{reason}; memory would allow about {int(max(curve.fits, most))}")

    def _find_calm_size(self) -> int | None:
        """The largest micro batch below the last one at which the allocator should not run full, as the last one did.

        None where it is known, or the forecast, which the trials correct, promises no more of it.
        """
        last = self.records[-1] if self.records else None
        if last is None or not isinstance(last.outcome, Fit) or not last.outcome.alloc_retries:
            return None
        smaller = [size for size in self.context.sizes if size < last.trial.knobs.micro_batch]
        calm = self.context.forecaster.largest_calm(self.trial_at(self.context.sizes[0]), smaller)
        if calm is None or calm in self.curve.peak_bytes:
            return None
        step, samples = self.context.forecaster.step_time(self.trial_at(calm)), self.trial_at(calm).knobs.train_batch(1)
        rate, measured = last.trial.knobs.train_batch(1), median_step_s(last)
        return calm if step is not None and samples / step.seconds > WORTH_GROWING * rate / measured else None

    def _check_forecast(self, size: int) -> int | GrowthEnd:
        """`size`, or a smaller micro batch that the forecast allows, or a stop where it promises no gain worth a trial.

        Where no step times are forecast, growth needs the trial.
        """
        curve, step_time = self.curve, self.context.forecaster.step_time
        fits = curve.fits
        if fits not in curve.peak_bytes or (now := step_time(self.trial_at(fits))) is None:
            return size
        if curve.too_large is None:  # a line through measured peaks does not know where they bend upwards
            larger = [each for each in curve.open_sizes(self.context.sizes) if each <= size]
            if (limit := self._limit_by_forecast(larger)) is None:
                reason = f"by the forecast micro batch {larger[0]} does not leave the headroom"
                return GrowthEnd(is_limit=True, reason=reason)
            size = limit
        if (then := step_time(self.trial_at(size))) is None:
            return size
        samples = [self.trial_at(each).knobs.train_batch(1) for each in (fits, size)]
        gain = samples[1] / then.seconds / (samples[0] / now.seconds)
        if gain >= WORTH_GROWING:
            return size
        reason = f"by the forecast micro batch {size} is only {format_factor(gain)} times as fast as {fits}"
        return GrowthEnd(is_limit=False, reason=reason)

    def _limit_by_forecast(self, sizes: Sequence[int]) -> int | None:
        """The largest of `sizes` that leaves the headroom by the measured peak and the forecast's rise from there."""
        context, fits, curve = self.context, self.curve.fits, self.curve
        now = context.forecaster.forecast(self.trial_at(fits))

        def is_too_large(size: int) -> bool:
            then = context.forecaster.forecast(self.trial_at(size))
            if now is None or then is None:
                return False
            rise = then.memory["device"].peak_bytes - now.memory["device"].peak_bytes
            return curve.peak_bytes[fits] + rise > curve.usable_bytes

        return find_last(sizes, is_too_large)

    def _most_by_rise(self) -> int | None:
        """The largest micro batch that leaves the headroom by the first peak and the forecast's rise from there."""
        curve, forecast = self.curve, self.context.forecaster.forecast
        if not self.records or curve.too_large is not None or curve.fits not in curve.peak_bytes:
            return None
        larger = curve.open_sizes(self.context.sizes)
        near = [size for size in larger if size == larger[0] or size <= _NEAR * curve.fits]
        limit = self._limit_by_forecast(near) if near else None
        return None if limit is None or forecast(self.trial_at(limit)) is None else limit

    def _sizes_tried(self) -> int:
        """How many trials growth had, those that measured a size again not counted."""
        return sum(not record.trial.repeat for record in self.records)

    def _stop_without_size(self, curve: BatchCurve) -> GrowthEnd:
        """The reason that no micro batch is left to try."""
        sizes, global_batch, fits = self.context.sizes, self.context.settings.global_batch, curve.fits
        usable = format_bytes(curve.usable_bytes)
        if curve.peak_bytes.get(fits, 0) > curve.usable_bytes:
            peak = format_bytes(curve.peak_bytes[fits])
            reason = f"micro batch {fits} already needs {peak}, which does not leave the headroom (usable: {usable})"
            return GrowthEnd(is_limit=True, reason=reason)
        if curve.too_large is not None:
            tried = [record for record in self.records if record.trial.knobs.micro_batch == curve.too_large]
            refused = max(
                (record for record in tried if not self.context.fits(record)),
                key=lambda record: record.outcome.kind == "fit" and record.outcome.device_peak_bytes,
            )
            between = f", and by the measured peaks {fits} is about the largest" if curve.open_sizes(sizes) else ""
            why = f"micro batch {curve.too_large} {describe_misfit(refused.outcome, curve.usable_bytes)}"
            return GrowthEnd(is_limit=True, reason=f"{why}{between}")
        if fits == sizes[-1]:
            is_share = global_batch is not None and fits == global_batch // self.context.world_size
            why = "is a rank's whole share of the global batch" if is_share else "is the largest that may be tried"
            return GrowthEnd(is_limit=False, reason=f"micro batch {fits} {why}")
        limit, following = curve.line_limit(), curve.open_sizes(sizes)[0]
        if limit is None or (limit >= following > LONGEST_JUMP * fits):
            divisor = f"{following}, the next divisor of a rank's share of the batch"
            return GrowthEnd(is_limit=False, reason=f"{divisor}, is too far above the measured ones to be predicted")
        line = "by the line through the measured peaks"
        return GrowthEnd(
            is_limit=True, reason=f"{line} micro batch {int(limit)} fills the {usable} that the headroom leaves"
        )


def describe_misfit(outcome: Outcome, usable_bytes: float) -> str:
    """Why the micro batch of a trial cannot be used, as the end of a sentence."""
    if isinstance(outcome, Fit) and not outcome.alloc_retries:
        peak, usable = format_bytes(outcome.device_peak_bytes), format_bytes(usable_bytes)
        return f"needs {peak}, which does not leave the headroom (usable: {usable})"
    only = ": this caps the micro batch only" if isinstance(outcome, Failed) else ""
    return describe_exam(outcome) + only
