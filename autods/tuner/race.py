"""Race the rungs that could be faster than the first that fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..config.profiles import RaceLimits
from ..types import Record, Steps
from .batch_size import Growth, GrowthResult, GrowthRules, Stop, grow_fully, growth_result
from .candidates import Candidate, in_precision, without_checkpointing
from .comparison import FinalsResult, comparison, finals
from .contestants import WITHOUT_RECOMPUTING, Entrant, Field, entrant_of
from .context import FitContext
from .forecasts import why_impossible
from .ladder_walk import Lessons, WalkResult, untried_rungs
from .trials import fit_steps_to_budget, is_same_config, median_step_s

_LAST_TRIALS = 2  # of the leader's growth, before the last comparison
_LEAST_FINAL = 2  # steps of the last comparison
_OTHER_SIZE = 1.25  # times the micro batch, to be another contestant of the last comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceResult:
    """What the race found.

    best: the winner's deciding trial. others: the best of each other config that fitted, best first. reasons: config →
    why it won, or lost.
    """

    best: Record
    grown: GrowthResult
    others: tuple[Record, ...]
    reasons: Mapping[str, str]


def race(
    first: Growth,
    rivals: Sequence[Candidate],
    rules: GrowthRules,
    *,
    winner: Candidate,
    walk_steps: Steps,
    limits: RaceLimits,
    lessons: Lessons,
    precisions: Sequence[str] = (),
    may_run: Callable[[int], bool] = lambda trials: True,
) -> RaceResult:
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
    field.entrants.append(Entrant(name=winner.rung.name, candidate=winner, growth=first))
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


def _finish(field: Field) -> RaceResult:
    """Measure the leaders again in turn; the best of that wins."""
    score, limits = field.rules.score, field.limits
    if field.rules.grows and field.may_run(_LAST_TRIALS + limits.finalists * limits.turns):
        field.leader().growth.extend(limits.finals, _LAST_TRIALS)
    standing = [one for one in field.entrants if one.growth.best() is not None]
    standing.sort(key=field.best_score, reverse=True)  # stable: of equals, the ladder's order
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
    won = next(one for record, one in close if is_same_config(record, final.best))
    won.growth.stop = won.growth.stop or Stop(is_limit=False, reason="the race ended before its memory was full")
    again = _again(final, close)
    reasons = {one.name: one.out or _behind(one, won, field, again) for one in field.entrants if one is not won}
    reasons[won.name] = f"{comparison(score)[0]} of {len(standing)} that fit: {final.reason}"
    for one in field.entrants:  # every rung has a word, also where only its variant was worth a trial
        reasons.setdefault(one.candidate.rung.name, f"recomputing would only cost it time: see {one.name}")
    others = tuple(best for one in standing if one is not won and (best := one.growth.best()) is not None)
    grown = replace(growth_result(won.growth), best=final.best)
    return RaceResult(best=final.best, grown=grown, others=others, reasons=reasons)


def _close(standing: Sequence[Entrant], field: Field) -> list[tuple[Record, Entrant]]:
    """Every trial that led, give or take the noise, best first."""
    score, to_beat = field.rules.score, field.to_beat()
    timed = [(record, one) for one in standing for record in one.growth.eligible()]
    close = [(record, one) for record, one in timed if score(record) >= to_beat]
    close.sort(key=lambda item: score(item[0]), reverse=True)
    return _apart(close)


def _again(final: FinalsResult, close: Sequence[tuple[Record, Entrant]]) -> dict[str, float]:
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
    return f"{one.said()}, {field.best_score(one) / field.best_score(won):.2f} {times} as {won.name}"


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
    return replace(
        record, trial=replace(record.trial, steps=fit_steps_to_budget(steps, median_step_s(record), least=_LEAST_FINAL))
    )


_CHOSEN = "the first rung of the ladder that fits"
_LEFT_OUT = f"{_CHOSEN}; recomputing was left out, since memory is not what ends its growth"


def take_first_fit(
    winner: Record,
    candidate: Candidate,
    rules: GrowthRules,
    *,
    walk_steps: Steps,
    limits: RaceLimits,
    may_run: Callable[[int], bool] = lambda trials: True,
) -> RaceResult:
    """Grow the walk's winner, and choose whether it recomputes its activations.

    Recomputing buys memory with time, and memory is worth a larger micro batch. So it is first grown without: where
    something else than memory ends that, recomputing has nothing to give. Otherwise both are grown, and the faster one
    is taken.
    """
    tries = limits.checkpointing and rules.grows and may_run(2)
    keeps = _keeping(candidate, rules, walk_steps) if tries else None
    if keeps is None or keeps.growth.best() is None:
        reasons = {} if keeps is None or keeps.out is None else {keeps.name: keeps.out}
        return _raced([grow_fully(winner, rules)], {candidate.rung.name: _CHOSEN, **reasons}, others=())
    assert keeps.growth.stop is not None
    if not keeps.growth.stop.is_limit:
        return _raced([keeps.growth], {keeps.name: _LEFT_OUT}, others=(winner,))
    return _faster(keeps.growth, grow_fully(winner, rules), keeps.name, candidate.rung.name)


def _faster(keeps: Growth, recomputes: Growth, keeps_name: str, recomputes_name: str) -> RaceResult:
    """Of the two, both grown."""
    raced = _raced([keeps, recomputes], {}, others=())
    first, second = keeps_name, recomputes_name
    if raced.best.trial.knobs.checkpointing:
        first, second = second, first
    slower = max(map(keeps.rules.score, raced.others), default=0.0) / keeps.rules.score(raced.best)
    return replace(raced, reasons={first: _CHOSEN, second: f"{slower:.2f} times as fast as {first}"})


def _keeping(candidate: Candidate, rules: GrowthRules, walk_steps: Steps) -> Entrant | None:
    """The rung without recomputing, grown as far as that goes; None for a model that cannot recompute."""
    if not candidate.knobs.checkpointing:
        return None
    keeps = entrant_of(without_checkpointing(candidate), rules, recomputes=True)
    keeps.out = why_impossible(rules.forecaster.forecast(keeps.trial_at(rules.sizes[0])))
    rules.forecaster.settle()
    if keeps.out is None:
        keeps.enter(walk_steps)
    if keeps.out is None:
        keeps.growth.ends()
    return keeps


def _raced(climbs: Sequence[Growth], reasons: dict[str, str], *, others: tuple[Record, ...]) -> RaceResult:
    """The fastest of these climbs."""
    score = climbs[0].rules.score
    fitting = [growth for growth in climbs if growth.eligible()]
    order = sorted(fitting, key=lambda growth: max(map(score, growth.eligible())), reverse=True)
    grown = growth_result(order[0])
    behind = tuple(best for growth in order[1:] if (best := growth.best()) is not None)
    return RaceResult(best=grown.best, grown=grown, others=(*behind, *others), reasons=reasons)


def run_race(first: Record, walked: WalkResult, rungs: Sequence[Candidate], context: FitContext) -> RaceResult:
    """first: the walk's winner."""
    rules, profile = _rules(context), context.settings.profile
    limits, walk_steps = profile.race, profile.walk
    rung = next(one for one in rungs if one.rung.name == first.trial.rung)
    winner = replace(rung, knobs=replace(rung.knobs, settings=first.trial.knobs.settings))
    if limits.stop == "first-fit":
        return take_first_fit(first, winner, rules, walk_steps=walk_steps, limits=limits, may_run=context.may_run)
    shorter = replace(rules.limits, most_trials=limits.most_trials)
    return race(
        grow_fully(first, rules),
        untried_rungs(rungs, walked),
        replace(rules, limits=shorter, steps=limits.steps),
        winner=winner,
        walk_steps=walk_steps,
        limits=limits,
        lessons=walked.lessons,
        precisions=context.settings.precisions,
        may_run=context.may_run,
    )


def _rules(context: FitContext) -> GrowthRules:
    settings = context.settings
    return GrowthRules(
        run=context.run,
        limits=settings.profile.grow,
        steps=settings.profile.timed,
        usable_bytes=context.usable_bytes,
        world_size=context.world_size,
        global_batch=settings.global_batch,
        forecaster=context.forecaster,
        score=context.score,
        grows=settings.objective != "memory",
    )
