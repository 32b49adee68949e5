"""Grow the micro batch of the rung that fits: the largest that memory allows, as far as it pays, in few trials."""

from __future__ import annotations

from dataclasses import dataclass

from ..values import Record
from .climb import Climb, Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """What growing found.

    best: the fastest timed trial. largest_micro_batch: the largest seen to fit with the headroom.
    largest_is_limit: larger ones do not run; otherwise growing stopped for another `reason`, a sentence.
    """

    best: Record
    records: tuple[Record, ...]
    largest_micro_batch: int
    largest_is_limit: bool
    reason: str


def grow(winner: Record, rules: Rules) -> Grown:
    """Grow from the walk's winner (micro batch 1, not timed) within the usable memory of the device.

    It begins at the micro batch that the forecast lets in, and goes on by what trials measure.
    """
    return grown_by(climbed(winner, rules))


def climbed(winner: Record, rules: Rules) -> Climb:
    """The climb of the walk's winner, ended."""
    climb = Climb(rules=rules, first=winner.trial, walked=winner)
    climb.ends()
    return climb


def grown_by(climb: Climb) -> Grown:
    """What a climb that ended with something that fits has found."""
    best = climb.best()
    assert best is not None
    assert climb.stop is not None
    return Grown(
        best=best,
        records=tuple(climb.records),
        largest_micro_batch=climb.ground.good,
        largest_is_limit=climb.stop.is_limit,
        reason=climb.stop.reason,
    )
