"""The race of a fit: the first rung that fits, grown; and the fastest of all, where that is what is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..search.candidates import Candidate
from ..search.climb import Rules
from ..search.first_fit import first_fit
from ..search.grow import climbed
from ..search.race import Raced, race
from ..search.walk import Walked
from ..values import Record
from .means import Means
from .walking import rivals_of


def raced_from(first: Record, walked: Walked, rungs: Sequence[Candidate], means: Means) -> Raced:
    """first: the walk's winner."""
    rules, profile = _rules(means), means.settings.profile
    limits, walk_steps = profile.race, profile.walk
    rung = next(one for one in rungs if one.rung.name == first.trial.rung)
    winner = replace(rung, knobs=replace(rung.knobs, settings=first.trial.knobs.settings))
    if limits.stop == "first-fit":
        return first_fit(first, winner, rules, walk_steps=walk_steps, limits=limits, may_run=means.may_run)
    shorter = replace(rules.limits, most_trials=limits.most_trials)
    return race(
        climbed(first, rules),
        rivals_of(rungs, walked),
        replace(rules, limits=shorter, steps=limits.steps),
        winner=winner,
        walk_steps=walk_steps,
        limits=limits,
        lessons=walked.lessons,
        precisions=means.settings.precisions,
        may_run=means.may_run,
    )


def _rules(means: Means) -> Rules:
    settings = means.settings
    return Rules(
        run=means.run,
        limits=settings.profile.grow,
        steps=settings.profile.timed,
        usable_bytes=means.usable_bytes,
        world_size=means.world_size,
        global_batch=settings.global_batch,
        foresight=means.foresight,
        score=means.score,
        grows=settings.objective != "memory",
        examines=means.examines_at_once,
        accumulate=settings.profile.accumulate if means.accumulates else None,
    )
