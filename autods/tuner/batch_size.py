"""Grow the micro batch of a config: the size to try next, and the reason to stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..config.profiles import GrowLimits
from ..types import Failed, Fit, OutOfMemory, Record, Run, Steps, Trial, first_line
from ..units import format_bytes
from .batch_curve import LONGEST_JUMP, BatchCurve, well_below
from .forecasts import NO_FORECASTER, Forecaster
from .trials import (
    accumulation_for,
    fit_steps_to_budget,
    fits_within,
    median_step_s,
    micro_batches,
    run_with_retry,
    samples_per_second,
)

_MOST_AT_FIRST = 64  # micro batch: a thousand samples may fit where throughput stops growing at twenty
_LONGER_STEPS = 2  # a step may take so many times the shortest one, even where that exceeds the trial's budget
_WORTH_A_LONG_STEP = 1.15  # ratio of micro batches below which a trial with steps near the longest is not worth it
# The walk times a single step. Its micro batch counts as slower where it is so many times slower than the best; where
# other trials time hardly more steps, the smaller ratio counts.
_SURELY_SLOWER = 1.5
_SLOWER_IN_SHORT_TRIALS = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthRules:
    """The settings of every growth in a fit. With `grows` False the micro batch stays at the smallest."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Why growth ended. `is_limit`: larger micro batches do not run; otherwise none was tried."""

    is_limit: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthResult:
    """The fastest timed trial, all records, the largest micro batch seen to fit with the headroom, and the reason."""

    best: Record
    records: tuple[Record, ...]
    largest_micro_batch: int
    largest_is_limit: bool
    reason: str


@dataclass(slots=True, kw_only=True)
class Growth:
    """The growth of one config, trial by trial.

    `first` is its trial at micro batch 1, or at the smallest that can be trained.
    `walked` is the record of that trial if it fitted; it has too few steps to count as timed.
    `records` are the trials of growth.
    `like` are trials of another config of the same model. They give the shape of the step time until this config has
    measured two sizes.
    """

    rules: GrowthRules
    first: Trial
    walked: Record | None = None
    records: list[Record] = field(default_factory=list)
    stop: Stop | None = None
    like: Sequence[Record] = ()
    _forecast_limits: list[int | None] = field(default_factory=list)  # computed once: it costs a simulation

    @property
    def all_records(self) -> tuple[Record, ...]:
        """The walk's record first."""
        return (*((self.walked,) if self.walked else ()), *self.records)

    @property
    def curve(self) -> BatchCurve:
        """Its measurements; at least one trial has fitted."""
        return BatchCurve.from_records(self.all_records, self.rules.usable_bytes)

    def run(self) -> None:
        """Grow until `stop` is set. Then time the smallest size as well, should it turn out to be the fastest."""
        while self.stop is None and self.try_next():
            pass
        if self._should_time_smallest():
            self.measure(self.first.knobs.micro_batch)

    def extend(self, steps: Steps, trials: int) -> None:
        """Grow in up to `trials` more trials of these steps. With a larger time budget, a step may last longer."""
        limits = replace(self.rules.limits, most_trials=len(self.records) + trials)
        self.rules = replace(self.rules, steps=steps, limits=limits)
        self.stop = None
        while self.stop is None and self.try_next():
            pass

    def try_next(self) -> bool:
        """Run one more trial. False when no size is left to try; `stop` then has the reason."""
        choice = self._choose()
        if isinstance(choice, Stop):
            self.stop = choice
            return False
        self.measure(choice)
        return True

    def measure(self, micro_batch: int) -> Record:
        """Time one micro batch at the fit's global batch."""
        knobs = replace(self.first.knobs, micro_batch=micro_batch, accumulation=self._accumulation(micro_batch))
        step_s = self._micro_step_at(micro_batch) * knobs.accumulation
        steps = fit_steps_to_budget(self.rules.steps, step_s, least=2)
        trial = replace(self.first, knobs=knobs, purpose="grow", steps=steps, repeat=0)
        self.records.extend(run_with_retry(trial, self.rules.run))
        return self.records[-1]

    @property
    def longest_step_s(self) -> float:
        """The seconds that a step may take. Where even the shortest step of the model is long, twice that time."""
        known = [seconds for record in (*self.all_records, *self.like) if (seconds := median_step_s(record))]
        return max(self.rules.steps.budget_s, _LONGER_STEPS * min(known, default=0.0))

    def forecast_limit(self) -> int | None:
        """The largest micro batch that should fit by the forecast; None when unknown."""
        if not self._forecast_limits:
            knobs = replace(self.first.knobs, accumulation=self._accumulation(1))
            trial = replace(self.first, knobs=knobs, purpose="grow", steps=self.rules.steps, repeat=0)
            self._forecast_limits.append(
                self.rules.forecaster.largest(trial, self.rules.sizes, self.rules.usable_bytes)
            )
        return self._forecast_limits[0]

    def eligible(self) -> list[Record]:
        """The timed trials that leave the headroom; micro batch 1 need not, because nothing is smaller.

        Where every timed trial failed, the walk's trial with the fit's global batch stands in.
        """
        eligible = [
            record
            for record in self.records
            if isinstance(record.outcome, Fit)
            and (record.trial.knobs.micro_batch == 1 or fits_within(record, self.rules.usable_bytes))
        ]
        if eligible or self.walked is None:
            return eligible
        knobs = replace(self.walked.trial.knobs, accumulation=self._accumulation(1))
        return [replace(self.walked, trial=replace(self.walked.trial, knobs=knobs))]

    def best(self) -> Record | None:
        """The eligible trial with the highest score."""
        return max(self.eligible(), key=self.rules.score, default=None)

    def result(self) -> GrowthResult:
        """The result of a growth that has stopped and has an eligible trial."""
        best = self.best()
        assert best is not None
        assert self.stop is not None
        return GrowthResult(
            best=best,
            records=tuple(self.records),
            largest_micro_batch=self.curve.fits,
            largest_is_limit=self.stop.is_limit,
            reason=self.stop.reason,
        )

    def _accumulation(self, micro_batch: int) -> int:
        return accumulation_for(self.rules.global_batch, micro_batch, self.rules.world_size)

    def _micro_step_at(self, micro_batch: int) -> float:
        """Seconds of a micro step; 0 where nothing is known."""
        curve, like = self.curve, BatchCurve.from_records(self.like)
        if len(curve.micro_step_s) == 1 and len(like.micro_step_s) > 1:
            ((size, seconds),) = curve.micro_step_s.items()
            return seconds * like.micro_step_at(micro_batch) / like.micro_step_at(size)
        return (curve if curve.micro_step_s else like).micro_step_at(micro_batch)

    def _choose(self) -> int | Stop:
        """The next micro batch, or the reason to stop."""
        rules, sizes, curve = self.rules, self.rules.sizes, self.curve
        if (stop := _stop_when_saturated(self.records, curve, sizes, rules.limits.gain)) is not None:
            return stop
        size = self._size_by_forecast(curve) or curve.next_size(sizes)
        if size is None:
            share = None if rules.global_batch is None else rules.global_batch // rules.world_size
            return _stop_without_size(curve, sizes, self.records, share)
        if len(self.records) >= rules.limits.most_trials:
            above = "" if curve.too_large is None else f" and {curve.too_large} does not"
            spent = f"all {rules.limits.most_trials} trials are spent"
            return Stop(is_limit=False, reason=f"{spent}: micro batch {curve.fits} fits{above}")
        if rules.global_batch is not None:
            return size  # a step has the same samples at every micro batch, so growth makes it hardly longer
        longest_s = self.longest_step_s
        open_sizes = curve.open_sizes(sizes)
        short = [other for other in open_sizes if other <= size and self._micro_step_at(other) <= longest_s]
        if short and (short[-1] == size or short[-1] >= _WORTH_A_LONG_STEP * curve.fits):
            return short[-1]
        long = next(other for other in open_sizes if other not in short)
        return Stop(
            is_limit=False,
            reason=f"a step of micro batch {long} would take about {self._micro_step_at(long):.1f} s, more than the"
            f" {longest_s:.1f} s that timing may take",
        )

    def _size_by_forecast(self, curve: BatchCurve) -> int | None:
        """The forecast's largest micro batch, until measured peaks show how they grow."""
        if self.records and (not self._forecast_limits or not math.isinf(curve.line_limit() or 0.0)):
            return None
        most = self.forecast_limit() or 0
        if not self.records and self.rules.global_batch is None:
            most = min(most, _MOST_AT_FIRST)
        return max((size for size in curve.open_sizes(self.rules.sizes) if size <= most), default=None)

    def _should_time_smallest(self) -> bool:
        """Whether nothing larger was timed, or the smallest timed size is the fastest and the walk's may be faster."""
        timed = [record for record in self.records if fits_within(record, self.rules.usable_bytes)]
        if not timed:
            return True
        best = max(timed, key=self.rules.score)
        if self._walk_was_slower_than(best):
            return False
        smallest = min(record.trial.knobs.micro_batch for record in timed)
        is_fastest = best.trial.knobs.micro_batch == smallest > self.first.knobs.micro_batch
        return is_fastest and len(self.records) < self.rules.limits.most_trials

    def _walk_was_slower_than(self, best: Record) -> bool:
        """Whether the walk's short trial shows that its micro batch is slower.

        With a global batch it says nothing: the walk took fewer micro batches a step than growth does.
        """
        if self.walked is None or self.rules.global_batch is not None:
            return False
        ratio = _SLOWER_IN_SHORT_TRIALS if self.rules.steps.most_timed <= 2 else _SURELY_SLOWER
        return ratio * samples_per_second(self.walked) < samples_per_second(best)


def grow(winner: Record, rules: GrowthRules) -> Growth:
    """Grow from the walk's winner until growth stops.

    It starts at the micro batch that the forecast allows, and goes on by the trials' measurements.
    """
    growth = Growth(rules=rules, first=winner.trial, walked=winner)
    growth.run()
    return growth


def describe_misfit(record: Record, usable: str) -> str:
    """Why a trial's micro batch cannot be used, as the end of a sentence. `usable` is the usable memory in words."""
    match record.outcome:
        case Fit(alloc_retries=int(retries)) if retries:
            return f"fits, but its allocator ran full {retries} times in the steps"
        case Fit() as fit:
            return f"needs {format_bytes(fit.device_peak_bytes)}, which does not leave the headroom (usable: {usable})"
        case OutOfMemory() as out:
            return f"ran out of {out.tier} memory"
        case Failed() as failure:
            return f"failed ({failure.failure}: {first_line(failure.evidence)}): this caps the micro batch only"


def _stop_when_saturated(
    records: Sequence[Record], curve: BatchCurve, sizes: Sequence[int], gain: float
) -> Stop | None:
    """A stop where the last trial at least doubled a micro batch and its throughput grew by less than `gain`."""
    timed = {
        record.trial.knobs.micro_batch: samples_per_second(record)
        for record in records
        if isinstance(record.outcome, Fit)
    }
    last = records[-1].trial.knobs.micro_batch if records else 0
    before = well_below(timed, last)
    if before is None or last not in timed or timed[last] >= gain * timed[before]:
        return None
    most = sizes[-1] if curve.too_large is None else curve.too_large - 1
    most = max(curve.fits, int(min(curve.line_limit() or curve.fits, most)))
    ratio = timed[last] / timed[before]
    return Stop(
        is_limit=False,
        reason=f"micro batch {last} is only {ratio:.2f} times as fast as {before}; memory would allow about {most}",
    )


def _stop_without_size(
    curve: BatchCurve, sizes: Sequence[int], records: Sequence[Record], whole_share: int | None
) -> Stop:
    """The reason that no micro batch is left to try. `whole_share` is a rank's part of the global batch, if any."""
    usable, fits = format_bytes(curve.usable_bytes), curve.fits
    if curve.peak_bytes[fits] > curve.usable_bytes:
        peak = format_bytes(curve.peak_bytes[1])
        return Stop(is_limit=True, reason=f"micro batch 1 already needs {peak}, usable: {usable}")
    if curve.too_large is not None:
        last = [record for record in records if record.trial.knobs.micro_batch == curve.too_large][-1]
        return Stop(is_limit=True, reason=f"micro batch {curve.too_large} {describe_misfit(last, usable)}")
    if fits == sizes[-1]:
        is_share = fits == whole_share
        why = "is a rank's whole share of the global batch" if is_share else "is the largest that may be tried"
        return Stop(is_limit=False, reason=f"micro batch {fits} {why}")
    limit, following = curve.line_limit(), curve.open_sizes(sizes)[0]
    if limit is None or (limit >= following > LONGEST_JUMP * fits):
        why = "is too far above the measured ones to be predicted"
        return Stop(is_limit=False, reason=f"{following}, the next divisor of a rank's share of the batch, {why}")
    return Stop(
        is_limit=True, reason=f"by the line through the measured peaks micro batch {int(limit)} fills the {usable}"
    )
