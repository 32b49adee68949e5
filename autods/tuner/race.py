"""Race the rungs that could be faster than the first one that fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..config.profiles import RaceLimits
from ..types import Record, Steps
from .batch_size import Growth, GrowthResult, GrowthRules, Stop, grow
from .candidates import Candidate, in_precision, without_checkpointing
from .comparison import FinalsResult, comparison_words, finals
from .contestants import WITHOUT_RECOMPUTING, Contestant, RaceField, new_contestant
from .context import FitContext
from .forecasts import why_impossible
from .ladder_walk import Lessons, WalkResult, untried_rungs
from .trials import fit_steps_to_budget, is_same_config, median_step_s

_LAST_TRIALS = 2  # of the leader's growth, before the last comparison
_FEWEST_FINAL_STEPS = 2
_OTHER_SIZE = 1.25  # ratio of two micro batches of one config below which only the larger is compared
_FIRST_RUNG = "the first rung of the ladder that fits"
_WITHOUT = f"{_FIRST_RUNG}; without checkpointing, since memory is not what ends its growth"


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceResult:
    """The result of a race.

    `best` is the winner's deciding trial.
    `others` has the best trial of each other config that fitted, best first.
    `reasons` tells why each config, by name, won or lost.
    """

    best: Record
    grown: GrowthResult
    others: tuple[Record, ...]
    reasons: Mapping[str, str]


def run_race(first: Record, walked: WalkResult, rungs: Sequence[Candidate], context: FitContext) -> RaceResult:
    """Grow the walk's winner `first` and, unless the profile says "first-fit", race the untried rungs against it."""
    settings = context.settings
    limits, walk_steps = settings.profile.race, settings.profile.walk
    rules = GrowthRules(
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
    rung = next(candidate for candidate in rungs if candidate.rung.name == first.trial.rung)
    winner = replace(rung, knobs=replace(rung.knobs, settings=first.trial.knobs.settings))
    if limits.stop == "first-fit":
        return take_first_fit(first, winner, rules, walk_steps=walk_steps, limits=limits, may_run=context.may_run)
    return race(
        grow(first, rules),
        untried_rungs(rungs, walked),
        replace(rules, limits=replace(rules.limits, most_trials=limits.most_trials), steps=limits.steps),
        winner=winner,
        walk_steps=walk_steps,
        limits=limits,
        lessons=walked.lessons,
        precisions=settings.precisions,
        may_run=context.may_run,
    )


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
    """Race `rivals` (in the ladder's order) against `first`, the finished growth of the walk's winner.

    A rival enters with one short trial at the leader's micro batch. It is out when its step times show that no micro
    batch would make it the fastest; the failure of another rung never decides. Those that stay in grow.

    Checkpointing costs every rung the same arithmetic, so the winner alone shows whether it pays. If it does not,
    rivals enter without it, and with it where memory limits them. Those that may lead are tried in the other allowed
    precisions. At last the leaders are measured again in turn.
    """
    field = RaceField(
        rules=rules,
        walk_steps=walk_steps,
        limits=limits,
        lessons=lessons,
        may_run=may_run,
        recomputes=winner.knobs.checkpointing,
    )
    field.contestants.append(Contestant(name=winner.rung.name, candidate=winner, growth=first))
    has_choice = limits.checkpointing and winner.knobs.checkpointing
    if has_choice:
        field.add([without_checkpointing(winner)])
    if has_choice and not field.recomputing_leads():
        field.add([without_checkpointing(rival) for rival in rivals])
        field.add(rival for rival in rivals if field.lacks_memory(without_checkpointing(rival)))
    else:
        field.add(rivals)
    if has_choice and field.recomputing_leads():
        field.add(without_checkpointing(candidate) for candidate in field.leading(WITHOUT_RECOMPUTING))
    for precision in precisions:
        field.add([in_precision(candidate, precision) for candidate in field.leading()])
    return _decide(field)


def _decide(field: RaceField) -> RaceResult:
    """Grow the leader once more with longer trials, and measure the leaders again in turn."""
    score, limits = field.rules.score, field.limits
    if field.rules.grows and field.may_run(_LAST_TRIALS + limits.finalists * limits.turns):
        field.leader().growth.extend(limits.finals, _LAST_TRIALS)
    fitting = [contestant for contestant in field.contestants if contestant.growth.best() is not None]
    fitting.sort(key=field.best_score, reverse=True)  # stable: of equals, the ladder's order
    close = _close_to_leader(fitting, field)
    finalists = max(1, sum(field.may_run(count) for count in range(1, limits.finalists + 1)))
    final = finals(
        [_with_final_steps(record, limits.finals) for record, _ in close[:finalists]],
        field.rules.run,
        turns=limits.turns if field.rules.grows else 0,
        usable_bytes=field.rules.usable_bytes,
        score=score,
        purpose="race",
        may_run=field.may_run,
    )
    winner = next(contestant for record, contestant in close if is_same_config(record, final.best))
    growth = winner.growth
    growth.stop = growth.stop or Stop(is_limit=False, reason="the race ended before its memory was full")
    remeasured = _remeasured_scores(final, close)
    reasons = {
        contestant.name: contestant.out or _why_slower(contestant, winner, field, remeasured)
        for contestant in field.contestants
        if contestant is not winner
    }
    reasons[winner.name] = f"{comparison_words(score)[0]} of {len(fitting)} that fit: {final.reason}"
    for contestant in field.contestants:  # some rungs were raced only without checkpointing
        rung = contestant.candidate.rung.name
        reasons.setdefault(rung, f"checkpointing would only cost it time: see {contestant.name}")
    return RaceResult(
        best=final.best,
        grown=replace(growth.result(), best=final.best),
        others=tuple(
            best
            for contestant in fitting
            if contestant is not winner and (best := contestant.growth.best()) is not None
        ),
        reasons=reasons,
    )


def _close_to_leader(fitting: Sequence[Contestant], field: RaceField) -> list[tuple[Record, Contestant]]:
    """The trials that led, give or take the noise, best first.

    Where micro batches of one config are similar, only the largest is kept: it is the fastest but for noise.
    """
    score, least = field.rules.score, field.score_to_beat()
    timed = [(record, contestant) for contestant in fitting for record in contestant.growth.eligible()]
    close = [(record, contestant) for record, contestant in timed if score(record) >= least]
    close.sort(key=lambda item: score(item[0]), reverse=True)
    kept = list(close)
    for record, contestant in close:
        size = record.trial.knobs.micro_batch
        sizes = [other.trial.knobs.micro_batch for other, owner in kept if owner is contestant]
        if any(size < other < _OTHER_SIZE * size for other in sizes):
            kept.remove((record, contestant))
    return kept


def _with_final_steps(record: Record, steps: Steps) -> Record:
    """The record with the longer trial by which the last comparison measures it."""
    steps = fit_steps_to_budget(steps, median_step_s(record), least=_FEWEST_FINAL_STEPS)
    return replace(record, trial=replace(record.trial, steps=steps))


def _remeasured_scores(final: FinalsResult, close: Sequence[tuple[Record, Contestant]]) -> dict[str, float]:
    """Contestant's name → its best score in the last comparison."""
    scores: dict[str, float] = {}
    for place in final.measured:
        name = close[place][1].name
        scores[name] = max(scores.get(name, 0.0), final.scores[place])
    return scores


def _why_slower(contestant: Contestant, winner: Contestant, field: RaceField, remeasured: Mapping[str, float]) -> str:
    """A contestant's speed and the winner's, by the last comparison where both took part."""
    _, times = comparison_words(field.rules.score)
    if contestant.name in remeasured and remeasured.get(winner.name):
        ratio = remeasured[contestant.name] / remeasured[winner.name]
        return f"{contestant.describe_best()} at first; measured again in turn, {ratio:.2f} {times} as {winner.name}"
    ratio = field.best_score(contestant) / field.best_score(winner)
    return f"{contestant.describe_best()}, {ratio:.2f} {times} as {winner.name}"


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

    Checkpointing buys memory with time, and memory allows a larger micro batch. So the rung is grown without it first.
    Where something else than memory ends that growth, checkpointing has nothing to give. Otherwise both are grown, and
    the faster one is taken.
    """
    plain = None
    if candidate.knobs.checkpointing and limits.checkpointing and rules.grows and may_run(2):
        plain = _grow_without_checkpointing(candidate, rules, walk_steps)
    if plain is None or plain.growth.best() is None:
        reasons = {} if plain is None or plain.out is None else {plain.name: plain.out}
        return _fastest([grow(winner, rules)], {candidate.rung.name: _FIRST_RUNG, **reasons}, others=())
    assert plain.growth.stop is not None
    if not plain.growth.stop.is_limit:
        return _fastest([plain.growth], {plain.name: _WITHOUT}, others=(winner,))
    result = _fastest([plain.growth, grow(winner, rules)], {}, others=())
    first, second = plain.name, candidate.rung.name
    if result.best.trial.knobs.checkpointing:
        first, second = second, first
    slower = max(map(rules.score, result.others), default=0.0) / rules.score(result.best)
    return replace(result, reasons={first: _FIRST_RUNG, second: f"{slower:.2f} times as fast as {first}"})


def _grow_without_checkpointing(candidate: Candidate, rules: GrowthRules, walk_steps: Steps) -> Contestant:
    """The rung without checkpointing, grown as far as it goes."""
    plain = new_contestant(without_checkpointing(candidate), rules, recomputes=True)
    plain.out = why_impossible(rules.forecaster.forecast(plain.trial_at(rules.sizes[0])))
    rules.forecaster.finish()
    if plain.out is None:
        plain.enter(walk_steps)
    if plain.out is None:
        plain.growth.run()
    return plain


def _fastest(growths: Sequence[Growth], reasons: dict[str, str], *, others: tuple[Record, ...]) -> RaceResult:
    """The best of these growths, with the best trials of the others."""
    score = growths[0].rules.score
    fitting = [growth for growth in growths if growth.eligible()]
    ranked = sorted(fitting, key=lambda growth: max(map(score, growth.eligible())), reverse=True)
    grown = ranked[0].result()
    behind = tuple(best for growth in ranked[1:] if (best := growth.best()) is not None)
    return RaceResult(best=grown.best, grown=grown, others=(*behind, *others), reasons=reasons)
