"""The tuning of a fit: the settings of the race's winner, and of the runner-up where that may be as fast."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from ..ds_config import get
from ..search.applies import tunable
from ..search.ask import is_alike
from ..search.finals import finals
from ..search.race import Raced
from ..search.tune import Tuned, tune
from ..values import Record
from .means import Means

# Of the trials of tuning, for a runner-up with the settings of the winner: what these are worth is known by then.
_SAME_KEYS = 1 / 3


def tuned_from(raced: Raced, means: Means) -> Tuned:
    """The winner, and the runner-up as well where it was as fast but for the noise."""
    tuned, runner_up = _tuned(raced.best, means), _as_fast(raced, means)
    tunes = means.settings.profile.tune.trials > 0 and means.settings.objective != "memory"
    if runner_up is None or not tunes or not _may_go_on(means):
        return tuned
    share = 1.0
    if _keys_of(runner_up, means) <= _keys_of(raced.best, means):
        if is_alike(tuned.best, raced.best):
            said = f"{runner_up.trial.rung}, as fast, has no other settings to try"
            return replace(tuned, reason=f"{tuned.reason}; {said}")
        share = _SAME_KEYS
    return _better(tuned, _tuned(runner_up, means, share), means)


def _as_fast(raced: Raced, means: Means) -> Record | None:
    """The best of the others, where the noise alone may have put it behind."""
    noise, score = means.settings.profile.race.noise / 2, means.score
    timed = [one for one in raced.others if one.trial.purpose != "walk"]
    return next((one for one in timed if score(one) >= (1 - noise) * score(raced.best)), None)


def _better(tuned: Tuned, also: Tuned, means: Means) -> Tuned:
    """Of the two the one that is faster in turns, with what was tried for both."""
    final = finals(
        [tuned.best, also.best],
        means.run,
        turns=means.settings.profile.tune.turns,
        usable_bytes=means.usable_bytes,
        score=means.score,
        purpose="tune",  # what confirmed the start has asked for its repeats already
    )
    first = also if is_alike(final.best, also.best) else tuned
    return replace(
        first,
        best=final.best,
        records=tuned.records + also.records + final.records,
        reason=f"{tuned.reason}; the runner-up: {also.reason}; {final.reason}",
    )


def _tuned(start: Record, means: Means, share: float = 1.0) -> Tuned:
    """share: of the trials that tuning may have."""
    settings, profile = means.settings, means.settings.profile
    limits = replace(profile.tune, trials=ceil(share * profile.tune.trials))
    rung = tunable(next(rung for rung in settings.ladder if rung.name == start.trial.rung), means.facts)
    config = means.final_config(start.trial)
    return tune(
        start,
        means.run,
        rung=rung,
        limits=limits,
        steps=profile.timed,
        limit_bytes=settings.device_bytes,
        headroom=profile.headroom,
        seed=settings.seed,
        study_path=means.study,
        current={key: value for key in rung.tune if (value := get(config, key)) is not None},
        foresight=means.foresight,
        score=means.score,
        may_go_on=lambda: _may_go_on(means),
    )


def _may_go_on(means: Means) -> bool:
    """Whether one more trial leaves enough to confirm what it may find."""
    return means.may_run(1 + 2 * means.settings.profile.tune.turns)


def _keys_of(record: Record, means: Means) -> set[str]:
    """What can be tuned of its rung."""
    return {key for one in means.settings.ladder if one.name == record.trial.rung for key in one.tune}
