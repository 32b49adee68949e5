"""The contestants of a race: each rung's climb, and the field of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from ..config.profiles import RaceLimits
from ..forecast.values import RungForecast
from ..types import Fit, Record, Steps, Trial
from ..units import format_bytes
from .batch_size import SURE, Growth, GrowthRules, least_sample_s, micro_step_seconds, promise, what_happened
from .candidates import Candidate, config_name
from .forecasts import why_impossible
from .ladder_walk import Lessons, first_trial, try_rung
from .trials import accumulation_for, fits_within

_TRIES = 3


@dataclass(slots=True, kw_only=True)
class Entrant:
    """A config and its climb.

    name: the rung, and what differs from its usual knobs. size: the micro batch with which it enters. out: why it is
    out, if it is. walked: the trials that looked whether it fits at all.
    """

    name: str
    candidate: Candidate
    growth: Growth
    size: int = 1
    out: str | None = None
    walked: tuple[Record, ...] = ()

    @property
    def records(self) -> tuple[Record, ...]:
        """All trials of it."""
        return (*self.walked, *self.growth.records)

    def trial_at(self, micro_batch: int) -> Trial:
        """What the climb would measure."""
        rules = self.growth.rules
        accumulation = accumulation_for(rules.global_batch, micro_batch, rules.world_size)
        knobs = replace(self.candidate.knobs, micro_batch=micro_batch, accumulation=accumulation)
        return replace(self.growth.first, knobs=knobs, purpose="grow", steps=rules.steps)

    def foresee(self) -> None:
        """Make the size smaller where its forecast says so; out, where nothing can fit."""
        rules = self.growth.rules
        forecast = rules.forecaster.forecast(self.trial_at(self.size))
        if forecast is None:
            self.size = 1
        elif not _has_room(forecast, rules.usable_bytes):
            smallest = rules.sizes[0]
            self.out = why_impossible(rules.forecaster.forecast(self.trial_at(smallest)))
            if self.out is None:
                self.size = min(self.size, self.growth.forecast_limit() or smallest)

    def enter(self, walk_steps: Steps) -> None:
        """The first trials: at its size, at a smaller one where that does not do, and else as the walk looks at it."""
        rules, size = self.growth.rules, self.size
        for _ in range(_TRIES):
            if size <= rules.sizes[0]:
                break
            record = self.growth.measure(size)
            if fits_within(record, rules.usable_bytes):
                return
            size = _smaller(record, rules)
            more = replace(rules.limits, most_trials=rules.limits.most_trials + len(self.growth.records))
            self.growth.rules = replace(rules, limits=more)  # a size that was too bold takes no trial from the climb
        self._walk(walk_steps)

    def _walk(self, steps: Steps) -> None:
        rules = self.growth.rules
        self.walked = try_rung(self.candidate, rules.run, steps)
        last = self.walked[-1]
        if not isinstance(last.outcome, Fit):
            self.out = what_happened(last, format_bytes(rules.usable_bytes))
            return
        if last.trial.knobs.settings != self.candidate.knobs.settings:  # unpinned: no earlier trial speaks of it
            self.walked, self.growth.records = (*self.growth.records, *self.walked), []
            knobs = replace(self.candidate.knobs, settings=last.trial.knobs.settings)
            self.candidate = replace(self.candidate, knobs=knobs, pinned=())
        self.growth.first = last.trial
        self.growth.walked = last
        if not self.growth.records:
            self.growth.try_next()

    def tries(self, size: int) -> bool:
        """Measure a micro batch near this one, or as far above what ran as is safe; False when there is none."""
        known = {record.trial.knobs.micro_batch for record in self.growth.seen}
        if size > self.growth.ground.good:
            return self.growth.stop is None and self.growth.try_next()
        below = max((one for one in known if one <= size), default=0)
        above = min((one for one in known if one > size), default=math.inf)
        sizes = [one for one in self.growth.rules.sizes if below < one < above]
        if not sizes:
            return False
        self.growth.measure(max((one for one in sizes if one <= size), default=sizes[0]))
        return True

    def most(self) -> float:
        """The largest micro batch that it may reach: as its measured peaks say, else as its forecast does."""
        rules = self.growth.rules
        if not self.growth.seen:
            return math.inf
        ground = self.growth.ground
        allowed = ground.allowed()
        if allowed is None or math.isinf(allowed):
            forecast_limit = self.growth.forecast_limit()
            allowed = rules.sizes[-1] if forecast_limit is None else max(forecast_limit, ground.good)
        return min(rules.sizes[-1], allowed, math.inf if ground.bad is None else ground.bad - 1)

    def longest(self, sample_s: float) -> float:
        """The largest micro batch whose step is short enough to be timed, where a sample costs so many seconds."""
        times = micro_step_seconds(self.growth.seen)
        if self.growth.rules.global_batch is not None or not times or sample_s <= 0:
            return math.inf
        size = max(times)
        return max(size, size + (self.growth.longest_step_s - times[size]) / (SURE * sample_s))

    def said(self) -> str:
        """How fast its best was; how lean, where that is what counts."""
        best = self.growth.best()
        if best is None or not isinstance(best.outcome, Fit):
            return "never fitted"
        if not self.growth.rules.grows:
            return f"needs {format_bytes(best.outcome.device_peak_bytes)}"
        return f"{best.outcome.samples_per_second:.3g} samples/s with micro batch {best.trial.knobs.micro_batch}"


def entrant_of(candidate: Candidate, rules: GrowthRules, *, recomputes: bool) -> Entrant:
    """A config that has not run yet. recomputes: the model can."""
    first = first_trial(candidate, rules.steps)
    name = config_name(candidate.rung.name, candidate.knobs, recomputes=recomputes)
    return Entrant(name=name, candidate=candidate, growth=Growth(rules=rules, first=first))


def _smaller(record: Record, rules: GrowthRules) -> int:
    """The next size to enter with: half, or less than what is over where the peak was measured.

    Not all of a peak grows with the micro batch; about half of it is taken to.
    """
    size, share = record.trial.knobs.micro_batch, 0.5
    if isinstance(record.outcome, Fit):
        over = 1 - rules.usable_bytes / record.outcome.device_peak_bytes
        share = max(0.5, 1 - 2 * over)
    return max((one for one in rules.sizes if one <= min(size - 1, size * share)), default=rules.sizes[0])


def _has_room(forecast: RungForecast, usable_bytes: float) -> bool:
    """Whether the middle of the forecast leaves the headroom on the device, and fits on the other tiers."""
    return all(
        use.limit_bytes is None or use.peak_bytes <= (usable_bytes if tier == "device" else use.limit_bytes)
        for tier, use in forecast.memory.items()
    )


# Recomputing activations is a third on top of forward and backward: leaving it out gains no more.
WITHOUT_RECOMPUTING = 4 / 3


@dataclass(slots=True, kw_only=True)
class Field:
    """A race under way. entrants: in the order in which they were let in. recomputes: the model can."""

    rules: GrowthRules
    walk_steps: Steps
    limits: RaceLimits
    lessons: Lessons
    may_run: Callable[[int], bool]
    recomputes: bool
    entrants: list[Entrant] = field(default_factory=list)

    def let_in(self, candidates: Iterable[Candidate]) -> None:
        """All forecasts first, since simulations would disturb what is timed; then a trial each; then the climbs."""
        asked = [entrant_of(one, self.rules, recomputes=self.recomputes) for one in candidates]
        known = {one.name for one in self.entrants}
        rivals = tuple(one for one in asked if one.name not in known)
        if not rivals:
            return
        size, leader = self._entry_size(), self.leader()
        for rival in rivals:
            rival.size = size
            rival.growth.like = (*self.entrants[0].growth.seen, *leader.growth.seen)  # the first has short steps, too
            self._learn(rival)
        self.rules.forecaster.prepare(rival.trial_at(size) for rival in rivals if rival.out is None)
        for rival in rivals:
            if rival.out is None:
                rival.foresee()
        self.rules.forecaster.settle()
        for rival in rivals:
            self._enter(rival)
        for rival in (self.leader(), *rivals):
            self._climb(rival)

    def leader(self) -> Entrant:
        """The best so far; of equals the first."""
        return max(self.entrants, key=self.best_score)

    def best_score(self, entrant: Entrant) -> float:
        """Of its best trial; 0 where none fitted."""
        best = entrant.growth.best()
        return 0.0 if best is None else self.rules.score(best)

    def to_beat(self) -> float:
        """What it takes to lead, give or take the noise."""
        return (1 - self.limits.noise) * self.best_score(self.leader())

    def leading(self, by: float = 1.0) -> list[Candidate]:
        """The best of those that would lead, give or take the noise, if they were `by` times as fast."""
        order = sorted(self.entrants, key=self.best_score, reverse=True)[: self.limits.finalists + 1]
        return [one.candidate for one in order if by * self.best_score(one) >= self.to_beat()]

    def recomputing_leads(self) -> bool:
        """Whether the fastest so far recomputes its activations."""
        return self.leader().candidate.knobs.checkpointing

    def lacks_memory(self, candidate: Candidate) -> bool:
        """Whether this config never fitted, or could lead if it had the memory for any batch, recomputing included."""
        name = config_name(candidate.rung.name, candidate.knobs, recomputes=self.recomputes)
        one = next(one for one in self.entrants if one.name == name)
        if one.growth.best() is None:
            return True
        if one.most() >= self.rules.sizes[-1]:
            return False
        sample_s = self.sample_s_of(one)
        best = promise(micro_step_seconds(one.growth.seen), most=one.longest(sample_s), sample_s=sample_s)
        return best.rate * self.rules.world_size / WITHOUT_RECOMPUTING >= self.to_beat()

    def _may_go_on(self) -> bool:
        """Whether one more trial leaves enough to measure the leaders again."""
        return self.may_run(1 + self.limits.finalists * min(1, self.limits.turns))

    def _learn(self, rival: Entrant) -> None:
        rival.out = rival.out or self.lessons.reason_to_skip(rival.candidate.rung, rival.candidate.ops)

    def _enter(self, rival: Entrant) -> None:
        self._learn(rival)
        if rival.out is None and not self._may_go_on():
            rival.out = "not tried: the budget is spent"
        if rival.out is None:
            rival.enter(self.walk_steps)
            decided = (rival.walked or rival.records)[-1]  # a large batch may fail of more than the rung does
            self.lessons = self.lessons.add(rival.candidate.rung, decided.outcome)
        self.entrants.append(rival)

    def _climb(self, rival: Entrant) -> None:
        """Measure further micro batches of it for as long as one may make it the fastest."""
        tries = 0
        while rival.out is None and tries < self.limits.most_trials and self._may_go_on():
            size = self._promising(rival)
            if size is None or not rival.tries(size):
                break
            tries += 1
        self.rules.forecaster.settle()

    def _promising(self, rival: Entrant) -> int | None:
        """The micro batch to measure next; out, when even its upper bound is below what the leader reached."""
        if not self.rules.grows:
            return None
        leader, world = self.leader(), self.rules.world_size
        times = micro_step_seconds(rival.growth.seen)
        sample_s = self.sample_s_of(rival)
        longest = rival.longest(sample_s)
        best = promise(times, most=longest, sample_s=sample_s)
        if best.rate * world >= self.to_beat():  # how far it may grow costs simulations: asked only where it matters
            best = promise(times, most=min(rival.most(), longest), sample_s=sample_s)
        if best.rate * world >= self.to_beat():
            return best.size
        if rival is not leader:
            ratio = best.rate * world / self.best_score(leader)
            rival.out = f"{rival.said()}; by its steps at most {ratio:.2f} times as fast as {leader.name}"
        return None

    def sample_s_of(self, rival: Entrant) -> float:
        """What one more sample costs: by those that recompute as the rival does, else by what recomputing saves."""
        recomputes = rival.candidate.knobs.checkpointing
        alike = [one.growth.seen for one in self.entrants if one.candidate.knobs.checkpointing is recomputes]
        if found := least_sample_s(alike):
            return found
        return least_sample_s(one.growth.seen for one in self.entrants) / (1 if recomputes else WITHOUT_RECOMPUTING)

    def _entry_size(self) -> int:
        """The leader's micro batch, and twice as much where memory is what ended the leader's climb."""
        leader = self.leader()
        best = leader.growth.best()
        assert best is not None
        ended = leader.growth.stop
        most = best.trial.knobs.micro_batch * (2 if ended is not None and ended.is_limit else 1)
        return max(size for size in self.rules.sizes if size <= most)
