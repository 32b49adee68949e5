"""Race the rungs that could still be fastest, each at its own best micro batch: the ladder is only a guess."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..profile import RaceLimits
from ..values import Record, Steps
from .ask import is_alike, paced, step_s_of
from .bounds import least_sample_s, micro_step_seconds, promise
from .candidates import Candidate
from .climb import Climb, Rules
from .entrant import Entrant, entrant_of
from .finals import comparison, finals
from .grow import Grown, grown_by
from .lessons import Lessons
from .stopping import Stop
from .variants import in_precision, name_of, without_checkpointing

# Recomputing activations is a third on top of forward and backward: leaving it out gains no more.
_WITHOUT_RECOMPUTING = 4 / 3
_LEAST_FINAL = 2  # steps of the last comparison
_OTHER_SIZE = 1.25  # times the micro batch, to be another contestant of the last comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Raced:
    """What the race found.

    best: the winner's deciding trial. others: the best of each other config that fitted, best first. reasons: config →
    why it won, or lost.
    """

    best: Record
    grown: Grown
    others: tuple[Record, ...]
    reasons: Mapping[str, str]


def race(
    first: Climb,
    rivals: Sequence[Candidate],
    rules: Rules,
    *,
    winner: Candidate,
    walk_steps: Steps,
    limits: RaceLimits,
    lessons: Lessons,
    precisions: Sequence[str] = (),
    may_run: Callable[[int], bool] = lambda trials: True,
) -> Raced:
    """first: the climb of the walk's winner, ended. rivals: rungs that the walk left untried, in the ladder's order.

    A rival enters with one short trial at the micro batch that the leader's climb makes promising. It is out when its
    own steps say that no micro batch would make it the fastest, never because another rung failed. Those that stay
    climb. Whether recomputing pays is seen of the winner first, since it costs every rung the same arithmetic: where it
    does not, rivals enter without, and recompute where memory keeps them from growing. Those that may lead are tried in
    the other precisions that were allowed; the leaders are measured again in turn.
    """
    field = _Field(
        rules=rules,
        walk_steps=walk_steps,
        limits=limits,
        lessons=lessons,
        may_run=may_run,
        recomputes=winner.knobs.checkpointing,
    )
    field.entrants.append(Entrant(name=winner.rung.name, candidate=winner, climb=first))
    chooses = limits.checkpointing and winner.knobs.checkpointing
    if chooses:
        field.let_in([without_checkpointing(winner)])
    if chooses and not field.recomputing_leads():
        field.let_in([without_checkpointing(one) for one in rivals])
        field.let_in(one for one in rivals if field.lacks_memory(without_checkpointing(one)))
    else:
        field.let_in(rivals)
    if chooses and field.recomputing_leads():
        field.let_in(without_checkpointing(one) for one in field.leading(_WITHOUT_RECOMPUTING))
    for precision in precisions:
        field.let_in([in_precision(one, precision) for one in field.leading()])
    return field.finish()


@dataclass(slots=True, kw_only=True)
class _Field:
    """A race under way."""

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
        size, leader = self._entry_size(), self._leader()
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
        for rival in (self._leader(), *rivals):
            self._climb(rival)

    def leading(self, by: float = 1.0) -> list[Candidate]:
        """The best of those that would lead, give or take the noise, if they were `by` times as fast."""
        order = sorted(self.entrants, key=self._score, reverse=True)[: self.limits.finalists + 1]
        return [one.candidate for one in order if by * self._score(one) >= self._to_beat()]

    def recomputing_leads(self) -> bool:
        """Whether the fastest so far recomputes its activations."""
        return self._leader().candidate.knobs.checkpointing

    def lacks_memory(self, candidate: Candidate) -> bool:
        """Whether this config never fitted, or could lead if it had the memory for any batch, recomputing included."""
        name = name_of(candidate.rung.name, candidate.knobs, recomputes=self.recomputes)
        one = next(one for one in self.entrants if one.name == name)
        if one.climb.best() is None:
            return True
        if one.most() >= self.rules.sizes[-1]:
            return False
        sample_s = self._sample_s(one)
        best = promise(micro_step_seconds(one.climb.seen), most=one.longest(sample_s), sample_s=sample_s)
        return best.rate * self.rules.world_size / _WITHOUT_RECOMPUTING >= self._to_beat()

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
        leader, world = self._leader(), self.rules.world_size
        times = micro_step_seconds(rival.climb.seen)
        sample_s = self._sample_s(rival)
        longest = rival.longest(sample_s)
        best = promise(times, most=longest, sample_s=sample_s, allowed=self.rules.sizes)
        if best.rate * world >= self._to_beat():  # how far it may grow costs simulations: asked only where it matters
            best = promise(times, most=min(rival.most(), longest), sample_s=sample_s, allowed=self.rules.sizes)
        if best.rate * world >= self._to_beat():
            return best.size
        if rival is not leader:
            ratio = best.rate * world / self._score(leader)
            rival.out = f"{rival.said()}; by its steps at most {ratio:.2f} times as fast as {leader.name}"
        return None

    def _sample_s(self, rival: Entrant) -> float:
        """What one more sample costs: by those that recompute as the rival does, else by what recomputing saves."""
        recomputes = rival.candidate.knobs.checkpointing
        alike = [one.climb.seen for one in self.entrants if one.candidate.knobs.checkpointing is recomputes]
        if found := least_sample_s(alike):
            return found
        return least_sample_s(one.climb.seen for one in self.entrants) / (1 if recomputes else _WITHOUT_RECOMPUTING)

    def _entry_size(self) -> int:
        """The leader's micro batch, and twice as much where memory is what ended the leader's climb."""
        leader = self._leader()
        best = leader.climb.best()
        assert best is not None
        ended = leader.climb.stop
        most = best.trial.knobs.micro_batch * (2 if ended is not None and ended.is_limit else 1)
        return max(size for size in self.rules.sizes if size <= most)

    def _leader(self) -> Entrant:
        return max(self.entrants, key=self._score)

    def _score(self, entrant: Entrant) -> float:
        best = entrant.climb.best()
        return 0.0 if best is None else self.rules.score(best)

    def _to_beat(self) -> float:
        return (1 - self.limits.noise) * self._score(self._leader())

    def finish(self) -> Raced:
        """Measure the leaders again in turn; the best of that wins."""
        standing = [one for one in self.entrants if one.climb.best() is not None]
        standing.sort(key=self._score, reverse=True)  # stable: of equals, the ladder's order
        to_beat = self._to_beat()
        timed = [(record, one) for one in standing for record in one.climb.eligible()]
        close = [(record, one) for record, one in timed if self.rules.score(record) >= to_beat]
        close.sort(key=lambda item: self.rules.score(item[0]), reverse=True)
        close = _apart(close)
        finalists = max(1, sum(self.may_run(count) for count in range(1, self.limits.finalists + 1)))
        contestants = [_longer(record, self.limits.finals) for record, _ in close[:finalists]]
        final = finals(
            contestants,
            self.rules.run,
            turns=self.limits.turns if self.rules.grows else 0,
            usable_bytes=self.rules.usable_bytes,
            score=self.rules.score,
            purpose="race",
            may_run=self.may_run,
        )
        won = next(one for record, one in close if is_alike(record, final.best))
        won.climb.stop = won.climb.stop or Stop(is_limit=False, reason="the race ended before its memory was full")
        again: dict[str, float] = {}
        for place in final.measured:
            name = close[place][1].name
            again[name] = max(again.get(name, 0.0), final.scores[place])
        reasons = {one.name: one.out or self._behind(one, won, again) for one in self.entrants if one is not won}
        reasons[won.name] = f"{comparison(self.rules.score)[0]} of {len(standing)} that fit: {final.reason}"
        for one in self.entrants:  # every rung has a word, also where only its variant was worth a trial
            reasons.setdefault(one.candidate.rung.name, f"recomputing would only cost it time: see {one.name}")
        others = tuple(best for one in standing if one is not won and (best := one.climb.best()) is not None)
        grown = replace(grown_by(won.climb), best=final.best)
        return Raced(best=final.best, grown=grown, others=others, reasons=reasons)

    def _behind(self, one: Entrant, won: Entrant, again: Mapping[str, float]) -> str:
        """again: scores of those that were measured again; a first one that was lucky says nothing beside them."""
        _, times = comparison(self.rules.score)
        if one.name in again and again.get(won.name):
            ratio = again[one.name] / again[won.name]
            return f"{one.said()} at first; measured again in turn, {ratio:.2f} {times} as {won.name}"
        return f"{one.said()}, {self._score(one) / self._score(won):.2f} {times} as {won.name}"


def _apart(close: Sequence[tuple[Record, Entrant]]) -> list[tuple[Record, Entrant]]:
    """Of micro batches of one config that lie close the larger: it is the faster one but for the noise, and to tell
    them apart is worth no trial."""
    found = list(close)
    for record, one in close:
        size = record.trial.knobs.micro_batch
        larger = [other.trial.knobs.micro_batch for other, its in found if its is one]
        if any(size < other < _OTHER_SIZE * size for other in larger):
            found.remove((record, one))
    return found


def _longer(record: Record, steps: Steps) -> Record:
    """To be measured with more steps: what is left to tell apart lies close together."""
    return replace(record, trial=replace(record.trial, steps=paced(steps, step_s_of(record), least=_LEAST_FINAL)))
