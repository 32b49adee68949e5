"""The contestants of a race: one growth for each config, and the rules by which they stay in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from ..config.profiles import RaceLimits
from ..forecast.values import RungForecast
from ..types import Fit, Record, Steps, Trial
from ..units import format_bytes
from .batch_curve import SURE, BatchCurve, least_sample_s
from .batch_size import Growth, GrowthRules, describe_misfit
from .candidates import Candidate, config_name
from .forecasts import why_impossible
from .ladder_walk import Lessons, first_trial, try_rung
from .trials import accumulation_for, fits_within

_ENTRY_TRIALS = 3  # at ever smaller micro batches, before the contestant is tried as the walk would try it
# Recomputing activations adds a third to forward and backward, so that leaving it out gains no more than this.
WITHOUT_RECOMPUTING = 4 / 3


@dataclass(slots=True, kw_only=True)
class Contestant:
    """A config in the race.

    `name` is the rung, and how the config differs from its usual knobs.
    `size` is the micro batch of its first trial.
    `out` is the reason that it left the race; None while it is in.
    `walked` are the trials that tried it at the smallest micro batch.
    """

    name: str
    candidate: Candidate
    growth: Growth
    size: int = 1
    out: str | None = None
    walked: tuple[Record, ...] = ()

    @property
    def curve(self) -> BatchCurve:
        """Its measurements."""
        return self.growth.curve

    def trial_at(self, micro_batch: int) -> Trial:
        """The trial by which its growth measures a micro batch."""
        rules = self.growth.rules
        accumulation = accumulation_for(rules.global_batch, micro_batch, rules.world_size)
        knobs = replace(self.candidate.knobs, micro_batch=micro_batch, accumulation=accumulation)
        return replace(self.growth.first, knobs=knobs, purpose="grow", steps=rules.steps)

    def check_forecast(self) -> None:
        """Lower `size` to the forecast's limit; set `out` where even the smallest cannot fit."""
        rules = self.growth.rules
        forecast = rules.forecaster.forecast(self.trial_at(self.size))
        if forecast is None:
            self.size = 1
        elif not _leaves_headroom(forecast, rules.usable_bytes):
            smallest = rules.sizes[0]
            self.out = why_impossible(rules.forecaster.forecast(self.trial_at(smallest)))
            if self.out is None:
                self.size = min(self.size, self.growth.forecast_limit() or smallest)

    def enter(self, walk_steps: Steps) -> None:
        """Run the first trials: at `size`, then at smaller ones, at last as the walk tries a rung."""
        rules, size = self.growth.rules, self.size
        for _ in range(_ENTRY_TRIALS):
            if size <= rules.sizes[0]:
                break
            record = self.growth.measure(size)
            if fits_within(record, rules.usable_bytes):
                return
            size = _smaller_size(record, rules)
            more = replace(rules.limits, most_trials=rules.limits.most_trials + len(self.growth.records))
            self.growth.rules = replace(rules, limits=more)  # growth does not pay for an entry that was too large
        self._walk(walk_steps)

    def _walk(self, steps: Steps) -> None:
        rules = self.growth.rules
        self.walked = try_rung(self.candidate, rules.run, steps)
        last = self.walked[-1]
        if not isinstance(last.outcome, Fit):
            self.out = describe_misfit(last, format_bytes(rules.usable_bytes))
            return
        if last.trial.knobs.settings != self.candidate.knobs.settings:  # unpinned: earlier trials ran another config
            self.walked, self.growth.records = (*self.growth.records, *self.walked), []
            knobs = replace(self.candidate.knobs, settings=last.trial.knobs.settings)
            self.candidate = replace(self.candidate, knobs=knobs, pinned=())
        self.growth.first = last.trial
        self.growth.walked = last
        if not self.growth.records:
            self.growth.try_next()

    def measure_near(self, size: int) -> bool:
        """Measure a micro batch near `size`, or as far above the measured ones as is safe. False: none is left."""
        if size > self.curve.fits:
            return self.growth.stop is None and self.growth.try_next()
        measured = {record.trial.knobs.micro_batch for record in self.growth.all_records}
        below = max((other for other in measured if other <= size), default=0)
        above = min((other for other in measured if other > size), default=math.inf)
        sizes = [other for other in self.growth.rules.sizes if below < other < above]
        if not sizes:
            return False
        self.growth.measure(max((other for other in sizes if other <= size), default=sizes[0]))
        return True

    def most_by_memory(self) -> float:
        """The largest micro batch by its measured peaks, else by its forecast."""
        rules = self.growth.rules
        if not self.growth.all_records:
            return math.inf
        curve = self.curve
        limit = curve.line_limit()
        if limit is None or math.isinf(limit):
            forecast = self.growth.forecast_limit()
            limit = rules.sizes[-1] if forecast is None else max(forecast, curve.fits)
        return min(rules.sizes[-1], limit, math.inf if curve.too_large is None else curve.too_large - 1)

    def most_by_time(self, sample_s: float) -> float:
        """The largest micro batch whose step is short enough to be timed, at `sample_s` seconds a sample."""
        times = self.curve.micro_step_s
        if self.growth.rules.global_batch is not None or not times or sample_s <= 0:
            return math.inf
        size = max(times)
        return max(size, size + (self.growth.longest_step_s - times[size]) / (SURE * sample_s))

    def describe_best(self) -> str:
        """Its best throughput; its peak memory where that is the objective."""
        best = self.growth.best()
        if best is None or not isinstance(best.outcome, Fit):
            return "never fitted"
        if not self.growth.rules.grows:
            return f"needs {format_bytes(best.outcome.device_peak_bytes)}"
        return f"{best.outcome.samples_per_second:.3g} samples/s with micro batch {best.trial.knobs.micro_batch}"


def new_contestant(candidate: Candidate, rules: GrowthRules, *, recomputes: bool) -> Contestant:
    """A config that has not run yet. `recomputes`: the model supports gradient checkpointing."""
    name = config_name(candidate.rung.name, candidate.knobs, recomputes=recomputes)
    growth = Growth(rules=rules, first=first_trial(candidate, rules.steps))
    return Contestant(name=name, candidate=candidate, growth=growth)


def _smaller_size(record: Record, rules: GrowthRules) -> int:
    """The next size to enter with: half, or less than the excess where the peak was measured.

    Not all of a peak grows with the micro batch; about half of it is taken to.
    """
    size, share = record.trial.knobs.micro_batch, 0.5
    if isinstance(record.outcome, Fit):
        excess = 1 - rules.usable_bytes / record.outcome.device_peak_bytes
        share = max(0.5, 1 - 2 * excess)
    return max((other for other in rules.sizes if other <= min(size - 1, size * share)), default=rules.sizes[0])


def _leaves_headroom(forecast: RungForecast, usable_bytes: float) -> bool:
    """Whether the middle of the forecast leaves the headroom on the device, and fits on the other tiers."""
    return all(
        use.limit_bytes is None or use.peak_bytes <= (usable_bytes if tier == "device" else use.limit_bytes)
        for tier, use in forecast.memory.items()
    )


@dataclass(slots=True, kw_only=True)
class RaceField:
    """A race under way. `contestants` are in the order of entry. `recomputes`: the model supports checkpointing."""

    rules: GrowthRules
    walk_steps: Steps
    limits: RaceLimits
    lessons: Lessons
    may_run: Callable[[int], bool]
    recomputes: bool
    contestants: list[Contestant] = field(default_factory=list)

    def add(self, candidates: Iterable[Candidate]) -> None:
        """Let candidates in that are not in yet: all forecasts, then a first trial each, then their growth.

        The forecasts come first because simulations would disturb timed trials.
        """
        names = {contestant.name for contestant in self.contestants}
        entering = [new_contestant(candidate, self.rules, recomputes=self.recomputes) for candidate in candidates]
        rivals = tuple(rival for rival in entering if rival.name not in names)
        if not rivals:
            return
        size, leader = self._entry_size(), self.leader()
        for rival in rivals:
            rival.size = size
            # The first contestant has timed small micro batches, too.
            rival.growth.like = (*self.contestants[0].growth.all_records, *leader.growth.all_records)
            self._apply_lessons(rival)
        self.rules.forecaster.prepare(rival.trial_at(size) for rival in rivals if rival.out is None)
        for rival in rivals:
            if rival.out is None:
                rival.check_forecast()
        self.rules.forecaster.finish()
        for rival in rivals:
            self._enter(rival)
        for contestant in (self.leader(), *rivals):
            self._grow(contestant)

    def leader(self) -> Contestant:
        """The best so far; of equals the first."""
        return max(self.contestants, key=self.best_score)

    def best_score(self, contestant: Contestant) -> float:
        """The score of its best trial; 0 where none fitted."""
        best = contestant.growth.best()
        return 0.0 if best is None else self.rules.score(best)

    def score_to_beat(self) -> float:
        """The leader's score less the noise."""
        return (1 - self.limits.noise) * self.best_score(self.leader())

    def leading(self, speedup: float = 1.0) -> list[Candidate]:
        """The best candidates that would lead, give or take the noise, if they were `speedup` times as fast."""
        ranked = sorted(self.contestants, key=self.best_score, reverse=True)[: self.limits.finalists + 1]
        least = self.score_to_beat()
        return [leader.candidate for leader in ranked if speedup * self.best_score(leader) >= least]

    def recomputing_leads(self) -> bool:
        """Whether the leader recomputes its activations."""
        return self.leader().candidate.knobs.checkpointing

    def lacks_memory(self, candidate: Candidate) -> bool:
        """Whether this config never fitted, or could lead, also while recomputing, if it had memory for any batch."""
        name = config_name(candidate.rung.name, candidate.knobs, recomputes=self.recomputes)
        contestant = next(entry for entry in self.contestants if entry.name == name)
        if contestant.growth.best() is None:
            return True
        if contestant.most_by_memory() >= self.rules.sizes[-1]:
            return False
        sample_s = self.sample_s(contestant)
        bound = contestant.curve.throughput_bound(contestant.most_by_time(sample_s), sample_s)
        return bound.rate * self.rules.world_size / WITHOUT_RECOMPUTING >= self.score_to_beat()

    def sample_s(self, contestant: Contestant) -> float:
        """Seconds of one more sample: by configs that recompute as this one does, else by all of them."""
        recomputes = contestant.candidate.knobs.checkpointing
        alike = [rival.curve for rival in self.contestants if rival.candidate.knobs.checkpointing is recomputes]
        if cost := least_sample_s(alike):
            return cost
        return least_sample_s(rival.curve for rival in self.contestants) / (1 if recomputes else WITHOUT_RECOMPUTING)

    def _may_go_on(self) -> bool:
        """Whether one more trial leaves enough to measure the leaders again."""
        return self.may_run(1 + self.limits.finalists * min(1, self.limits.turns))

    def _apply_lessons(self, rival: Contestant) -> None:
        rival.out = rival.out or self.lessons.reason_to_skip(rival.candidate.rung, rival.candidate.ops)

    def _enter(self, rival: Contestant) -> None:
        self._apply_lessons(rival)
        if rival.out is None and not self._may_go_on():
            rival.out = "not tried: the budget is spent"
        if rival.out is None:
            rival.enter(self.walk_steps)
            decisive = (rival.walked or rival.growth.records)[-1]  # a large batch can fail where the rung does not
            self.lessons = self.lessons.add(rival.candidate.rung, decisive.outcome)
        self.contestants.append(rival)

    def _grow(self, contestant: Contestant) -> None:
        """Measure further micro batches for as long as one may make it the fastest."""
        trials = 0
        while contestant.out is None and trials < self.limits.most_trials and self._may_go_on():
            size = self._promising_size(contestant)
            if size is None or not contestant.measure_near(size):
                break
            trials += 1
        self.rules.forecaster.finish()

    def _promising_size(self, contestant: Contestant) -> int | None:
        """The micro batch to measure next; sets `out` when even the upper bound is below the leader's score."""
        if not self.rules.grows:
            return None
        leader, world_size = self.leader(), self.rules.world_size
        curve, sample_s = contestant.curve, self.sample_s(contestant)
        longest = contestant.most_by_time(sample_s)
        bound = curve.throughput_bound(longest, sample_s)
        if bound.rate * world_size >= self.score_to_beat():  # the memory limit costs a simulation
            bound = curve.throughput_bound(min(contestant.most_by_memory(), longest), sample_s)
        if bound.rate * world_size >= self.score_to_beat():
            return bound.size
        if contestant is not leader:
            ratio = bound.rate * world_size / self.best_score(leader)
            limit = f"by its steps at most {ratio:.2f} times as fast as {leader.name}"
            contestant.out = f"{contestant.describe_best()}; {limit}"
        return None

    def _entry_size(self) -> int:
        """The leader's micro batch, or twice that if memory ended the leader's growth."""
        leader = self.leader()
        best = leader.growth.best()
        assert best is not None
        stop = leader.growth.stop
        most = best.trial.knobs.micro_batch * (2 if stop is not None and stop.is_limit else 1)
        return max(size for size in self.rules.sizes if size <= most)
