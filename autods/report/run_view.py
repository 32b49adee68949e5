"""A training run on the terminal: its attempts, what ended each, what was changed, what that cost."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..units import escape_controls
from .results.run import AttemptRow, RunReport
from .text import format_seconds

_TO_WEIGHTS = "zero_to_fp32.py"  # DeepSpeed puts it into a checkpoint of ZeRO
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
