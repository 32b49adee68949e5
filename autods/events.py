"""What a fit tells its listener while it works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .types import Phase, Record, Skipped, Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A sentence for a person who waits: starting Ray, building an op, resuming."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStarted:
    """A trial begins to run (not sent for one that the journal answers)."""

    id: int
    trial: Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialMoved:
    """The slowest rank's heartbeat, a few times a second."""

    id: int
    phase: Phase
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFinished:
    """A trial ended; `replayed` when the journal knew its outcome from an earlier run."""

    record: Record
    replayed: bool = False


Event = Note | TrialStarted | TrialMoved | TrialFinished | Skipped
Listener = Callable[[Event], None]
