"""Race the rungs that could still be fastest, each at its own best micro batch: the ladder is only a guess."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..profile import RaceLimits
from ..values import Record, Steps
from .ask import is_alike, paced, step_s_of
from .candidates import Candidate
from .climb import Climb, Rules
from .entrant import Entrant
from .field import WITHOUT_RECOMPUTING, Field
from .finals import Finals, comparison, finals
from .further import Further
from .grow import Grown, grown_by
from .lessons import Lessons
from .stopping import Stop
from .variants import in_precision, without_checkpointing

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
    field = Field(
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
        field.let_in(without_checkpointing(one) for one in field.leading(WITHOUT_RECOMPUTING))
    for precision in precisions:
        field.let_in([in_precision(one, precision) for one in field.leading()])
    return _finish(field)


def _finish(field: Field) -> Raced:
    """Measure the leaders again in turn; the best of that wins."""
    score, limits = field.rules.score, field.limits
    standing = [one for one in field.entrants if one.climb.best() is not None]
    standing.sort(key=field.score_of, reverse=True)  # stable: of equals, the ladder's order
    close = _close(standing, field)
    finalists = max(1, sum(field.may_run(count) for count in range(1, limits.finalists + 1)))
    final = finals(
        [_longer(record, limits.finals) for record, _ in close[:finalists]],
        field.rules.run,
        turns=limits.turns if field.rules.grows else 0,
        usable_bytes=field.rules.usable_bytes,
        score=score,
        purpose="race",
        may_run=field.may_run,
    )
    won = next(one for record, one in close if is_alike(record, final.best))
    won.climb.stop = won.climb.stop or Stop(is_limit=False, reason="the race ended before its memory was full")
    fastest = _further(final.best, won, field)
    again = _again(final, close)
    reasons = {one.name: one.out or _behind(one, won, field, again) for one in field.entrants if one is not won}
    reasons[won.name] = f"{comparison(score)[0]} of {len(standing)} that fit: {final.reason}"
    for one in field.entrants:  # every rung has a word, also where only its variant was worth a trial
        reasons.setdefault(one.candidate.rung.name, f"recomputing would only cost it time: see {one.name}")
    others = tuple(best for one in standing if one is not won and (best := one.climb.best()) is not None)
    grown = replace(grown_by(won.climb), best=fastest)
    return Raced(best=fastest, grown=grown, others=others, reasons=reasons)


def _further(best: Record, won: Entrant, field: Field) -> Record:
    spent_s = sum(record.seconds for one in field.entrants for record in one.records)
    last = Further(steps=field.limits.finals, sample_s=field.sample_s_of(won), spent_s=spent_s, may_run=field.may_run)
    return last.grown(best, won.climb)


def _close(standing: Sequence[Entrant], field: Field) -> list[tuple[Record, Entrant]]:
    """Every trial that led, give or take the noise, best first."""
    score, to_beat = field.rules.score, field.to_beat()
    timed = [(record, one) for one in standing for record in one.climb.eligible()]
    close = [(record, one) for record, one in timed if score(record) >= to_beat]
    close.sort(key=lambda item: score(item[0]), reverse=True)
    return _apart(close)


def _again(final: Finals, close: Sequence[tuple[Record, Entrant]]) -> dict[str, float]:
    """Name → the best score of those of its trials that were measured again."""
    again: dict[str, float] = {}
    for place in final.measured:
        name = close[place][1].name
        again[name] = max(again.get(name, 0.0), final.scores[place])
    return again


def _behind(one: Entrant, won: Entrant, field: Field, again: Mapping[str, float]) -> str:
    """A first score that was lucky says nothing beside those that were measured again."""
    _, times = comparison(field.rules.score)
    if one.name in again and again.get(won.name):
        ratio = again[one.name] / again[won.name]
        return f"{one.said()} at first; measured again in turn, {ratio:.2f} {times} as {won.name}"
    return f"{one.said()}, {field.score_of(one) / field.score_of(won):.2f} {times} as {won.name}"


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
