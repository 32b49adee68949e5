"""A race under way: who enters and at what micro batch, who climbs on, and who is out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..profile import RaceLimits
from ..values import Steps
from .bounds import least_sample_s, micro_step_seconds, promise
from .candidates import Candidate
from .climb import Rules
from .entrant import Entrant, entrant_of
from .lessons import Lessons
from .variants import name_of

# Recomputing activations is a third on top of forward and backward: leaving it out gains no more.
WITHOUT_RECOMPUTING = 4 / 3


@dataclass(slots=True, kw_only=True)
class Field:
    """A race under way. entrants: in the order in which they were let in. recomputes: the model can."""

    rules: Rules
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
            rival.climb.like = (*self.entrants[0].climb.seen, *leader.climb.seen)  # the first has short steps, too
            self._learn(rival)
        self.rules.foresight.prepare(rival.trial_at(size) for rival in rivals if rival.out is None)
        for rival in rivals:
            if rival.out is None:
                rival.foresee()
        self.rules.foresight.settle()
        for rival in rivals:
            self._enter(rival)
        for rival in (self.leader(), *rivals):
            self._climb(rival)

    def leader(self) -> Entrant:
        """The best so far; of equals the first."""
        return max(self.entrants, key=self.score_of)

    def score_of(self, entrant: Entrant) -> float:
        """Of its best trial; 0 where none fitted."""
        best = entrant.climb.best()
        return 0.0 if best is None else self.rules.score(best)

    def to_beat(self) -> float:
        """What it takes to lead, give or take the noise."""
        return (1 - self.limits.noise) * self.score_of(self.leader())

    def leading(self, by: float = 1.0) -> list[Candidate]:
        """The best of those that would lead, give or take the noise, if they were `by` times as fast."""
        order = sorted(self.entrants, key=self.score_of, reverse=True)[: self.limits.finalists + 1]
        return [one.candidate for one in order if by * self.score_of(one) >= self.to_beat()]

    def recomputing_leads(self) -> bool:
        """Whether the fastest so far recomputes its activations."""
        return self.leader().candidate.knobs.checkpointing

    def lacks_memory(self, candidate: Candidate) -> bool:
        """Whether this config never fitted, or could lead if it had the memory for any batch, recomputing included."""
        name = name_of(candidate.rung.name, candidate.knobs, recomputes=self.recomputes)
        one = next(one for one in self.entrants if one.name == name)
        if one.climb.best() is None:
            return True
        if one.most() >= self.rules.sizes[-1]:
            return False
        sample_s = self.sample_s_of(one)
        best = promise(micro_step_seconds(one.climb.seen), most=one.longest(sample_s), sample_s=sample_s)
        return best.rate * self.rules.world_size / WITHOUT_RECOMPUTING >= self.to_beat()

    def _may_go_on(self) -> bool:
        """Whether one more trial leaves enough to measure the leaders again."""
        return self.may_run(1 + self.limits.finalists * min(1, self.limits.turns))

    def _learn(self, rival: Entrant) -> None:
        rival.out = rival.out or self.lessons.against(rival.candidate.rung, rival.candidate.ops)

    def _enter(self, rival: Entrant) -> None:
        self._learn(rival)
        if rival.out is None and not self._may_go_on():
            rival.out = "not tried: the budget is spent"
        if rival.out is None:
            rival.enter(self.walk_steps)
            decided = (rival.walked or rival.records)[-1]  # a large batch may fail of more than the rung does
            self.lessons = self.lessons.after(rival.candidate.rung, decided.outcome)
        self.entrants.append(rival)

    def _climb(self, rival: Entrant) -> None:
        """Measure further micro batches of it for as long as one may make it the fastest."""
        tries = 0
        while rival.out is None and tries < self.limits.most_trials and self._may_go_on():
            size = self._promising(rival)
            if size is None or not rival.tries(size):
                break
            tries += 1
        self.rules.foresight.settle()

    def _promising(self, rival: Entrant) -> int | None:
        """The micro batch to measure next; out, when even its upper bound is below what the leader reached."""
        if not self.rules.grows:
            return None
        leader, world = self.leader(), self.rules.world_size
        times = micro_step_seconds(rival.climb.seen)
        sample_s = self.sample_s_of(rival)
        longest = rival.longest(sample_s)
        best = promise(times, most=longest, sample_s=sample_s, allowed=self.rules.sizes)
        if best.rate * world >= self.to_beat():  # how far it may grow costs simulations: asked only where it matters
            best = promise(times, most=min(rival.most(), longest), sample_s=sample_s, allowed=self.rules.sizes)
        if best.rate * world >= self.to_beat():
            return best.size
        if rival is not leader:
            ratio = best.rate * world / self.score_of(leader)
            rival.out = f"{rival.said()}; by its steps at most {ratio:.2f} times as fast as {leader.name}"
        return None

    def sample_s_of(self, rival: Entrant) -> float:
        """What one more sample costs: by those that recompute as the rival does, else by what recomputing saves."""
        recomputes = rival.candidate.knobs.checkpointing
        alike = [one.climb.seen for one in self.entrants if one.candidate.knobs.checkpointing is recomputes]
        if found := least_sample_s(alike):
            return found
        return least_sample_s(one.climb.seen for one in self.entrants) / (1 if recomputes else WITHOUT_RECOMPUTING)

    def _entry_size(self) -> int:
        """The leader's micro batch, and twice as much where memory is what ended the leader's climb."""
        leader = self.leader()
        best = leader.climb.best()
        assert best is not None
        ended = leader.climb.stop
        most = best.trial.knobs.micro_batch * (2 if ended is not None and ended.is_limit else 1)
        return max(size for size in self.rules.sizes if size <= most)
