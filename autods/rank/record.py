"""What a rank leaves behind: the result of its job, or the description of its error."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ..diagnosis.evidence import RankError
from ..plain_text import clean, read_text, read_traceback
from ..system.stacks import find_raiser
from ..types import Communication, Examined, ModelFacts, Trained
from ..workload.protocol import WorkloadError

_MOST_CAUSES = 8
Peaks: TypeAlias = Mapping[str, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """What one rank of a trial measured.

    `step_s` has the seconds of each timed step, `steps_s` those of all steps, `losses` one loss for each step that was
    not skipped. `build_s` and `init_s` came before. `peaks` has bytes and counts, by the meter's names for them.
    `update_size`, `gradient_norms` and `trained` are of a parity trial, `examined` is of a worst-case exam.
    `tokens_per_sample` is what a script's batches had.
    """

    step_s: tuple[float, ...] = ()
    steps_s: float = 0.0
    losses: tuple[float, ...] = ()
    skipped_steps: int = 0
    build_s: float = 0.0
    init_s: float = 0.0
    peaks: Peaks = field(default_factory=dict)
    update_size: float | None = None
    gradient_norms: tuple[float, ...] = ()
    examined: Examined | None = None
    communication: Communication | None = None
    trained: Trained | None = None
    tokens_per_sample: float | None = None
    kind: Literal["trial"] = "trial"


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyResult:
    """The facts of a workload, and for each DeepSpeed op that cannot be built here the reason."""

    facts: ModelFacts
    op_problems: Mapping[str, str]
    kind: Literal["survey"] = "survey"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsResult:
    """DeepSpeed's ops are built."""

    kind: Literal["ops"] = "ops"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightResult:
    """The ranks reach each other. `bytes_per_s` is the rate of an all-reduce: what a ring's rank sends a second."""

    bytes_per_s: float
    kind: Literal["preflight"] = "preflight"


ReadingKind = Literal[
    "matmul", "kernel", "reduction", "attention", "launch", "view", "copy", "pageable_copy", "collective", "host",
    "host_optimizer", "nvme",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The seconds that one piece of work took. The kinds are those of a forecast's work, with its `bytes` and `flops`.

    `name` is the dtype of a matmul, the name of a collective, or what else tells readings of a kind apart.
    """

    kind: ReadingKind
    name: str
    size: int
    seconds: float
    bytes: int = 0
    flops: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureResult:
    """What the machine reaches, and the parts that could not be measured, with the reason."""

    readings: tuple[Reading, ...]
    left_out: tuple[str, ...]
    kind: Literal["measure"] = "measure"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a rank's part of a run ended. `step` is None where a script trains and saves by itself.

    `unsaved` is why no checkpoint has that step, where the disk had no room for it.
    """

    ended: Literal["done", "stopped"]
    step: int | None
    unsaved: str | None = None
    peaks: Peaks = field(default_factory=dict)
    kind: Literal["run"] = "run"


JobResult: TypeAlias = RankResult | SurveyResult | OpsResult | RunResult | PreflightResult | MeasureResult
ScriptEnd: TypeAlias = ModelFacts | RankResult  # of a survey, of a trial


def describe_error(error: BaseException, user_file: str) -> RankError:
    """Return the exception as printable texts.

    Where it passed through the user's file, `user_frame` is in that or in a module of theirs that it calls.
    """
    walked = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in walked if frame.f_code.co_filename == user_file]
    contract = None
    if isinstance(error, WorkloadError):
        file, _, line = (error.place or "").rpartition(":")
        contract = f"{file}:{line}: {error.problem}" if line.isdigit() else error.problem
    causes: list[BaseException] = []  # explicit ones, or handled ones; the nearest first
    cause = _find_cause(error)
    while cause is not None and not any(cause is known for known in causes) and len(causes) < _MOST_CAUSES:
        causes.append(cause)
        cause = _find_cause(cause)
    types = [cls.__name__ for cls in type(error).__mro__ if cls not in (object, BaseException)] or ["BaseException"]
    return RankError(
        types=tuple(read_text(name) for name in types),
        message=read_text(error),
        traceback=read_traceback(error),
        causes=tuple((read_text(type(cause).__name__), read_text(cause)) for cause in causes),
        user_frame=str(find_raiser(error) or f"{user_file}:{lines[-1]}") if lines else None,
        contract=clean(contract) if contract else contract,
        own_batch=error.own_batch if isinstance(error, WorkloadError) else None,
        hint=clean(error.hint) if isinstance(error, WorkloadError) and error.hint else None,
    )


def _find_cause(error: BaseException) -> BaseException | None:
    """The exception from which this one was raised, or which was handled when it was raised."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)
