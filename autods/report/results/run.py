"""The result of `autods run`: its attempts, and the steps that its folder has on record."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    checkpointing: bool | int
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

    `workload` is the name of what is trained, and `device_bytes` what a rank may use.
    `step` is the last optimizer step that a checkpoint holds. `losses` are the first and the last one that a step had;
    `step_s` is the median time of a step of the last attempt. Both are None where no step is on record.
    `rung`, `knobs`, `world_size` and `ds_config` are those of the last attempt.
    """

    status: Literal["done", "stopped", "failed", "nothing_fits"]
    exit_code: int
    reason: str = ""
    advice: str = ""
    workload: str = ""
    parameters: int | None = None
    device_bytes: int | None = None
    step: int = 0
    steps: int | None = None
    losses: tuple[float, float] | None = None
    step_s: float | None = None
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
    def reached_step(self) -> int:
        """The optimizer step at which the run ended. What lies beyond `step` is in no checkpoint."""
        if self.status == "done" or not self.attempts:
            return self.step
        return max(self.step, self.attempts[-1].last_step)

    @property
    def repeated(self) -> int:
        """Optimizer steps that were done again."""
        return sum(attempt.repeated for attempt in self.attempts)

    @property
    def seconds(self) -> float:
        """The time of all attempts."""
        return sum(attempt.seconds for attempt in self.attempts)

    @property
    def samples_per_second(self) -> float | None:
        """The samples of an optimizer step by its median time."""
        return self.global_batch / self.step_s if self.step_s else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            **asdict(self),
            "steps_repeated": self.repeated,
            "seconds": self.seconds,
            "samples_per_second": self.samples_per_second,
        }


def summarize_steps(steps: Mapping[int, StepDone], attempts: Sequence[AttemptRow]) -> dict[str, Any]:
    """Return the fields of a report that the steps on record tell."""
    losses = [done.loss for _, done in sorted(steps.items()) if done.loss is not None and math.isfinite(done.loss)]
    begin = attempts[-1].first_step if attempts else 0
    times = [done.seconds for step, done in steps.items() if step > begin]
    return {
        "losses": (losses[0], losses[-1]) if losses else None,
        "step_s": statistics.median(times) if times else None,
    }


def parse_steps(lines: Iterable[str]) -> Iterator[StepDone]:
    """Yield the optimizer steps in lines that rank 0 wrote to steps.jsonl; others and torn ones are left out."""
    for text in lines:
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            line = json.loads(text)
            if "loss" in line:
                yield StepDone(
                    step=int(line["step"]),
                    loss=line["loss"],
                    seconds=float(line["seconds"]),
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
