"""The result of `autods run`: its attempts, and the steps that its folder has on record."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...events import StepDone
from ...types import Knobs
from .shown import Shown


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """One start of the ranks.

    It began at the checkpoint of `first_step` and got to `last_step`. `repeated` steps of it had been done before.
    `evidence` says what ended it, `changed` what was changed after it; both may be None.
    """

    number: int
    began: float  # seconds since 1970
    rung: str
    micro_batch: int
    accumulation: int
    world_size: int
    checkpointing: bool
    first_step: int
    last_step: int
    repeated: int
    seconds: float
    ending: str
    evidence: str | None = None
    changed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunReport(Shown):
    """The result of a run. `exit_code` is that of the command. `reason` says why a run failed, `advice` what helps.

    `step` is the last optimizer step that a checkpoint holds. `rung`, `knobs`, `world_size` and `ds_config` are those
    of the last attempt.
    """

    status: Literal["done", "stopped", "failed", "nothing_fits"]
    exit_code: int
    reason: str = ""
    advice: str = ""
    step: int = 0
    steps: int | None = None
    global_batch: int = 0
    rung: str | None = None
    knobs: Knobs | None = None
    world_size: int = 0
    ds_config: Mapping[str, Any] = field(default_factory=dict)
    attempts: tuple[AttemptRow, ...] = ()
    rescues: int = 0
    warnings: tuple[str, ...] = ()
    checkpoint: str | None = None
    fit: str = ""
    out: str = ""

    @property
    def repeated(self) -> int:
        """Optimizer steps that were done again."""
        return sum(attempt.repeated for attempt in self.attempts)

    @property
    def seconds(self) -> float:
        """The time of all attempts."""
        return sum(attempt.seconds for attempt in self.attempts)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "steps_repeated": self.repeated, "seconds": self.seconds}


def parse_steps(lines: Iterable[str]) -> Iterator[StepDone]:
    """Yield the optimizer steps in lines that rank 0 wrote to steps.jsonl; others and torn ones are left out."""
    for text in lines:
        with contextlib.suppress(ValueError, RecursionError):
            line = json.loads(text)
            if "loss" in line:
                yield StepDone(
                    step=int(line["step"]),
                    loss=line["loss"],
                    seconds=line["seconds"],
                    device_peak_bytes=line.get("device_peak_bytes"),
                    steps=line.get("steps"),
                )


def read_steps(folder: Path) -> dict[int, StepDone]:
    """Return each optimizer step of the run in this folder, a repeated one as it was done last."""
    attempts = (path for path in folder.glob("attempts/*/steps.jsonl") if path.parent.name.isdigit())
    steps: dict[int, StepDone] = {}
    for path in sorted(attempts, key=lambda path: int(path.parent.name)):
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            steps |= {done.step: done for done in parse_steps(file)}
    return dict(sorted(steps.items()))
