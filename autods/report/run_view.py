"""A training run on the terminal and as JSON: its attempts, what ended each, what was changed, what that cost."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import InputError
from ..events import AttemptStarted, Note, RankPrinted, RunEvent, StepDone
from ..files import LARGEST_RECORD, read_file
from ..schema import read_known
from ..types import Knobs
from ..units import escape_controls, format_bytes
from .live import Progress
from .serialize import as_json, write_whole
from .text import format_seconds

RUN = "run.json"
_TO_WEIGHTS = "zero_to_fp32.py"  # DeepSpeed puts it into a checkpoint of ZeRO
_STEP_LINE_EVERY_S = 10.0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
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


def write_run(report: RunReport) -> None:
    """Write run.json into the run's folder."""
    write_whole(Path(report.out) / RUN, as_json(report.to_dict()))


def has_run(folder: Path) -> bool:
    """Whether the folder is that of a run that has ended once."""
    return (folder / RUN).is_file()


def read_run(folder: Path) -> RunReport:
    """Read run.json. Raises InputError for a file that cannot be read."""
    path = folder / RUN
    try:
        return read_known(RunReport, json.loads(read_file(path, most=LARGEST_RECORD)))
    except (ValueError, RecursionError) as error:
        raise InputError(f"is damaged: {error}", place=str(path), hint="the same autods run writes it again") from None


_HEADLINES = {"done": "done", "stopped": "stopped", "failed": "failed", "nothing_fits": "nothing fits"}
_STYLES = {"done": "bold green", "stopped": "bold yellow"}


def print_run(report: RunReport, console: Console) -> None:
    """The end of a run: headline, attempts, and how to go on."""
    console.print(Text(describe_headline(report), style=_STYLES.get(report.status, "bold red")), end="")
    console.print(
        f": {format_seconds(report.seconds)}, {count_noun(report.rescues, 'rescue')}", highlight=False, end=""
    )
    console.print(f", {count_noun(report.repeated, 'step')} repeated", highlight=False)
    if report.reason:
        console.print(Text(escape_controls(report.reason)), soft_wrap=True)
    if report.advice:
        console.print(Text(f"What to do: {escape_controls(report.advice)}"), soft_wrap=True)
    if report.attempts:
        console.print(_attempts_table(report))
    for warning in report.warnings:
        console.print(Text(f"warning: {escape_controls(warning)}"), soft_wrap=True)
    if report.checkpoint is not None:
        console.print(Text(f"checkpoint: {report.checkpoint}"), soft_wrap=True)
        if (Path(report.checkpoint) / _TO_WEIGHTS).is_file():
            folder = shlex.quote(report.checkpoint)
            console.print(Text(f"weights: cd {folder} && python {_TO_WEIGHTS} . weights -t state"), soft_wrap=True)
    if report.status in ("stopped", "failed") and report.attempts:
        before = "" if report.status == "stopped" else "once that is mended, "
        console.print(f"{before}the same command goes on", highlight=False)


def _attempts_table(report: RunReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, side in (("", "right"), ("began", "left"), ("config", "left"), ("steps", "right"), ("again", "right")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    table.add_column("time", justify="right")
    table.add_column("end", overflow="fold")
    table.add_column("then", overflow="fold")
    for row in report.attempts:
        table.add_row(*(Text(escape_controls(cell)) for cell in describe_attempt(row).values()))
    return table


def describe_headline(report: RunReport) -> str:
    """'done at step 12 of 12'."""
    goal = f" of {report.steps:,}" if report.steps is not None else ""
    return f"{_HEADLINES[report.status]} at step {report.step:,}{goal}"


def describe_attempt(row: AttemptRow) -> dict[str, str]:
    """The cells of an attempt's row by column, in the order of the table."""
    return {
        "number": str(row.number),
        "began": time.strftime("%m-%d %H:%M:%S", time.localtime(row.began)),
        "config": f"{row.rung}, {row.micro_batch} × {row.accumulation} × {row.world_size}",
        "steps": f"{row.first_step:,}–{row.last_step:,}",
        "repeated": str(row.repeated),
        "time": format_seconds(row.seconds),
        "end": row.ending if row.evidence is None else f"{row.ending}: {row.evidence}",
        "then": row.changed or "",
    }


def count_noun(number: int, noun: str) -> str:
    """'1 step', '2 steps'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class RunProgress:
    """A listener of a run and a context manager: the fit's progress, then what rank 0 prints, and steps now and then.

    Everything goes to standard error.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._fit: Progress | None = None
        self._steps: int | None = None
        self._said_s = 0.0

    def __enter__(self) -> Self:
        self._fit = Progress(self._console)
        self._fit.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._fit is not None:
            self._fit.__exit__(*error)
            self._fit = None

    def __call__(self, event: RunEvent) -> None:
        match event:
            case AttemptStarted():
                self.__exit__(None, None, None)
                self._steps, self._said_s = event.steps, 0.0
            case RankPrinted(text=text):
                self._print(text)
            case StepDone():
                self._print_step(event)
            case Note(text=text) if self._fit is None:
                self._print(f"autods: {text}")
            case _:
                if self._fit is not None:
                    self._fit(event)

    def _print_step(self, event: StepDone) -> None:
        now = time.monotonic()
        self._steps = event.steps if event.steps is not None else self._steps
        if now - self._said_s < _STEP_LINE_EVERY_S and event.step != self._steps:
            return
        self._said_s = now
        parts = [f"step {event.step:,}" + (f" of {self._steps:,}" if self._steps is not None else "")]
        if event.loss is not None:
            parts.append(f"loss {event.loss:.4g}")
        parts.append(f"{event.seconds:.3g} s")
        if event.device_peak_bytes is not None:
            parts.append(f"device {format_bytes(event.device_peak_bytes)}")
        self._print(f"autods: {', '.join(parts)}")

    def _print(self, text: str) -> None:
        self._console.print(escape_controls(text), markup=False, highlight=False, soft_wrap=True)
