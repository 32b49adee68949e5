"""The first rung that fits, grown: without recomputing its activations, unless memory makes that the slower way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..profile import RaceLimits
from ..values import Record, Steps
from .candidates import Candidate
from .climb import Climb, Rules
from .entrant import Entrant, entrant_of
from .foresight import why_impossible
from .grow import climbed, grown_by
from .race import Raced
from .variants import without_checkpointing

_CHOSEN = "the first rung of the ladder that fits"
_LEFT_OUT = f"{_CHOSEN}; recomputing was left out, since memory is not what ends its growth"


def first_fit(
    winner: Record,
    candidate: Candidate,
    rules: Rules,
    *,
    walk_steps: Steps,
    limits: RaceLimits,
    may_run: Callable[[int], bool] = lambda trials: True,
) -> Raced:
    """Grow the walk's winner, and choose whether it recomputes its activations.

    Recomputing buys memory with time, and memory is worth a larger micro batch. So it is first grown without: where
    something else than memory ends that, recomputing has nothing to give. Otherwise both are grown, and the faster one
    is taken. winner: of the candidate as it is, or of what keeps its activations.
    """
    if candidate.knobs.checkpointing and not winner.trial.knobs.checkpointing:
        return _beside(winner, candidate, rules, walk_steps, may_run)
    tries = limits.checkpointing and rules.grows and may_run(2)
    keeps = _keeping(candidate, rules, walk_steps) if tries else None
    if keeps is None or keeps.climb.best() is None:
        reasons = {} if keeps is None or keeps.out is None else {keeps.name: keeps.out}
        return _raced([climbed(winner, rules)], {candidate.rung.name: _CHOSEN, **reasons}, others=())
    assert keeps.climb.stop is not None
    if not keeps.climb.stop.is_limit:
        return _raced([keeps.climb], {keeps.name: _LEFT_OUT}, others=(winner,))
    return _faster(keeps.climb, climbed(winner, rules), keeps.name, candidate.rung.name)


def _beside(
    winner: Record, candidate: Candidate, rules: Rules, walk_steps: Steps, may_run: Callable[[int], bool]
) -> Raced:
    """The winner keeps its activations; recomputing enters beside it where memory ends its growth."""
    keeps, name = climbed(winner, rules), entrant_of(without_checkpointing(candidate), rules, recomputes=True).name
    assert keeps.stop is not None
    if not keeps.stop.is_limit or not may_run(2):
        return _raced([keeps], {name: _CHOSEN if keeps.stop.is_limit else _LEFT_OUT}, others=())
    recomputes = entrant_of(candidate, rules, recomputes=True)
    recomputes.enter(walk_steps)
    if recomputes.out is not None:
        return _raced([keeps], {name: _CHOSEN, recomputes.name: recomputes.out}, others=())
    recomputes.climb.ends()
    return _faster(keeps, recomputes.climb, name, recomputes.name)


def _faster(keeps: Climb, recomputes: Climb, keeps_name: str, recomputes_name: str) -> Raced:
    """Of the two, both grown."""
    raced = _raced([keeps, recomputes], {}, others=())
    first, second = keeps_name, recomputes_name
    if raced.best.trial.knobs.checkpointing:
        first, second = second, first
    slower = max(map(keeps.rules.score, raced.others), default=0.0) / keeps.rules.score(raced.best)
    return replace(raced, reasons={first: _CHOSEN, second: f"{slower:.2f} times as fast as {first}"})


def _keeping(candidate: Candidate, rules: Rules, walk_steps: Steps) -> Entrant | None:
    """The rung without recomputing, grown as far as that goes; None for a model that cannot recompute."""
    if not candidate.knobs.checkpointing:
        return None
    keeps = entrant_of(without_checkpointing(candidate), rules, recomputes=True)
    keeps.out = why_impossible(rules.foresight.forecast(keeps.trial_at(rules.sizes[0])))
    rules.foresight.settle()
    if keeps.out is None:
        keeps.enter(walk_steps)
    if keeps.out is None:
        keeps.climb.ends()
    return keeps


def _raced(climbs: Sequence[Climb], reasons: dict[str, str], *, others: tuple[Record, ...]) -> Raced:
    """The fastest of these climbs."""
    score = climbs[0].rules.score
    fitting = [climb for climb in climbs if climb.eligible()]
    order = sorted(fitting, key=lambda climb: max(map(score, climb.eligible())), reverse=True)
    grown = grown_by(order[0])
    behind = tuple(best for climb in order[1:] if (best := climb.best()) is not None)
    return Raced(best=grown.best, grown=grown, others=(*behind, *others), reasons=reasons)
