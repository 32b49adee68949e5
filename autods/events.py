"""Events that a fit or a probe sends to its listener while it works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .types import Phase, Record, Skipped, Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A sentence about progress: starting Ray, building an op, resuming.

    A `passing` one is about a wait, and does not say what goes on from here.
    """

    text: str
    passing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStarted:
    """A trial begins to run. Trials that the journal answers send only `TrialFinished`."""

    id: int
    trial: Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialMoved:
    """The heartbeat of the slowest rank, a few times a second."""

    id: int
    phase: Phase
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFinished:
    """A trial ended. The outcome of a `replayed` one comes from the journal of an earlier run."""

    record: Record
    replayed: bool = False


Event = Note | TrialStarted | TrialMoved | TrialFinished | Skipped
Listener = Callable[[Event], None]
