"""The walk of a fit: down the ladder to the first rung that fits; what came closest, and what it left untried."""

from __future__ import annotations

from collections.abc import Sequence

from ..journal import key_of
from ..search.candidates import Candidate
from ..search.shortfall import Closest, shortfall
from ..search.variants import without_checkpointing
from ..search.walk import Walked, first_trial, walk
from ..values import Record
from .means import Means


def walked_down(rungs: Sequence[Candidate], means: Means) -> Walked:
    """To the first rung that fits."""
    memory, steps = means.memory, means.settings.profile.walk

    def before(candidate: Candidate) -> Candidate | None:
        return _keeping(candidate, means)

    return walk(rungs, memory.run, steps, memory.listen, means.foresight, before=before)


def closest_of(walked: Walked, means: Means) -> Closest | None:
    """The rung that lacked least, where the walk came to its end and none fitted."""
    if walked.stopped:
        return None
    settings = means.settings
    return shortfall(
        walked.records,
        means.memory.run,
        settings.profile.walk,
        settings.device_bytes,
        can_unlimit=settings.device_bytes_asked,
    )


def rivals_of(rungs: Sequence[Candidate], walked: Walked) -> tuple[Candidate, ...]:
    """The rungs that the walk neither tried nor passed over. One that keeps states on NVMe moves them there and back in
    each step, and its op takes minutes to build: it only runs where nothing else fits."""
    known = {record.trial.rung for record in walked.records} | {skipped.rung for skipped in walked.skipped}
    return tuple(
        one
        for one in rungs
        if one.skip is None and one.rung.name not in known and "nvme" not in one.rung.places.values()
    )


def recomputing(winner: Record, rungs: Sequence[Candidate], means: Means) -> tuple[Candidate, ...]:
    """The winner's rung with recomputing, where nobody looked at that: what it may back off to."""
    rung = winner.trial.rung
    known = [one for one in means.memory.records if one.trial.rung == rung and one.trial.knobs.checkpointing]
    return () if known else tuple(one for one in rungs if one.rung.name == rung and one.knobs.checkpointing)


def _keeping(candidate: Candidate, means: Means) -> Candidate | None:
    """The rung without recomputing, where the first rung that fits is taken and this one fits by far: recomputing
    would cost it time, and a trial to see that."""
    race = means.settings.profile.race
    if race.stop != "first-fit" or not race.checkpointing or means.settings.objective == "memory":
        return None
    if not candidate.knobs.checkpointing or candidate.stand_in:
        return None
    lighter = without_checkpointing(candidate)
    trial = first_trial(lighter, means.settings.profile.walk)
    known = key_of(trial) in means.memory.past.records  # what ran out later, before a kill, changes no first look
    return lighter if known or means.foresight.is_obvious(trial) else None
