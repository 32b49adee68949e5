"""More micro batches a step for what a fit has chosen, where the user left open how many samples a step has."""

from __future__ import annotations

from dataclasses import replace

from .accumulate import accumulate
from .context import Means
from .optuna_search import Tuned


def accumulated_from(tuned: Tuned, means: Means) -> Tuned:
    """The same with the winner's batch of a step as large as it pays."""
    profile = means.settings.profile
    if not means.accumulates or not means.may_run(1):
        return tuned
    said = accumulate(
        tuned.best,
        means.run,
        limits=profile.accumulate,
        steps=profile.timed,
        world_size=means.world_size,
        noise=profile.race.noise,
        usable_bytes=means.usable_bytes,
        foresight=means.foresight,
        score=means.score,
    )
    return tuned if said.reason is None else replace(tuned, best=said.best, accumulation=said.reason)
