"""Events that a fit, a probe or a run sends to its listener while it works."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .types import Phase, Record, Skipped, Tier, TierUse, Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A sentence about progress: starting Ray, building an op, resuming.

    A `passing` one is about a wait, and does not say what goes on from here. One that `warns` stays with the result: a
    fit and a run write it down.
    """

    text: str
    passing: bool = False
    warns: bool = False

    def __str__(self) -> str:
        return f"warning: {self.text}" if self.warns else self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of a fit, and about how many `trials` it takes."""

    name: str
    trials: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchStarted:
    """A fit begins to try its rungs, which `ladder` names in their order.

    A config has to leave free what of `device_bytes` is not in `usable_bytes`. Where `least_memory` is set, the one
    with the lowest peak is searched for. `most_trials` and `most_seconds` are the budget; 0 means no limit. In a
    rehearsal (`rehearsed`) simulations answer the trials. A model that `recomputes` can do gradient checkpointing.
    """

    ladder: tuple[str, ...]
    device_bytes: int
    usable_bytes: float
    least_memory: bool = False
    most_trials: int = 0
    most_seconds: float = 0.0
    rehearsed: bool = False
    recomputes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStarted:
    """The stage at `place` of the search's `stages` begins; their trials are estimated by what is known by now."""

    stages: tuple[Stage, ...]
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialForecasted:
    """The memory that a trial would need, by the forecast: its peaks and limits. The trial may never run."""

    trial: Trial
    memory: Mapping[Tier, TierUse] = field(default_factory=dict)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStarted:
    """The ranks of a run are about to train, from `first_step` on; `steps` is where the run ends, if that is known."""

    number: int
    first_step: int
    steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPrinted:
    """A line that rank 0 of a run printed."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """An optimizer step of a run, of `steps` where the ranks know their number.

    `device_peak_bytes` is the peak so far; `loss` the mean of all ranks.
    """

    step: int
    loss: float | None
    seconds: float
    device_peak_bytes: int | None = None
    steps: int | None = None


Event = Note | SearchStarted | StageStarted | TrialForecasted | TrialStarted | TrialMoved | TrialFinished | Skipped
RunEvent = Event | AttemptStarted | RankPrinted | StepDone
Listener = Callable[[Event], None]
RunListener = Callable[[RunEvent], None]
