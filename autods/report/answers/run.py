"""The document of `autods run`: its attempts, what ended each, what was changed, and how to go on."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...config.checkpointing import describe_state
from ...units import format_bytes, format_count
from .. import document as doc
from ..document import Column, Medium, line, make_document, tabulate
from ..results.run import AttemptRow, RunReport, read_steps
from ..text import format_number_of, format_rate, format_seconds, format_step_seconds

_TO_WEIGHTS = "zero_to_fp32.py"  # DeepSpeed puts it into a checkpoint of ZeRO
_MOST_POINTS = 60  # of a chart
_HEADLINES = {"done": "done", "stopped": "stopped", "failed": "failed", "nothing_fits": "nothing fits"}
_STYLES = {"done": "green", "stopped": "yellow", "interrupted": "yellow"}  # of a run or an attempt; else red
_MEASURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss", "loss", lambda loss: f"{loss:.4g}"),
    ("seconds of a step", "seconds", format_step_seconds),
    ("device memory of rank 0, the peak", "device_peak_bytes", format_bytes),
)

ATTEMPTS: tuple[Column[AttemptRow], ...] = (
    Column(name="", read=lambda row: str(row.number), right=True),
    Column(name="began", read=lambda row: time.strftime("%m-%d %H:%M:%S", time.localtime(row.began)), wraps=True),
    Column(name="config", read=lambda row: _describe_config(row), wraps=True),
    Column(name="steps", read=lambda row: _describe_steps(row), right=True),
    Column(name="again", read=lambda row: str(row.repeated), right=True),
    Column(name="time", read=lambda row: format_seconds(row.seconds), right=True),
    Column(name="end", read=lambda row: line((_describe_end(row), _STYLES.get(row.ending, "red"))), wraps=True),
    Column(name="then", read=lambda row: row.changed or "", wraps=True),
)


def _describe_config(row: AttemptRow) -> str:
    return f"{row.rung}, {row.micro_batch} × {row.accumulation} × {row.world_size}"


def _describe_steps(row: AttemptRow) -> str:
    return "–" if row.last_step == row.first_step else f"{row.first_step:,}–{row.last_step:,}"


def _describe_end(row: AttemptRow) -> str:
    if row.evidence is None or row.evidence.startswith(row.ending):
        return row.evidence or row.ending
    return f"{row.ending}: {row.evidence}"


def make_run_document(report: RunReport, folder: Path | None = None) -> doc.Document:
    """What a run shows. Its page has charts of the steps that its folder has on record; None leaves them out."""
    title = Path(report.out).resolve().name
    size = f", {format_count(report.parameters)} parameters" if report.parameters else ""
    question = (
        f"{report.workload}{size}, trained by {format_number_of(report.world_size, 'rank')}" if report.rung else ""
    )
    return make_document(title=title, question=question, parts=_list_parts(report, folder))


def _list_parts(report: RunReport, folder: Path | None) -> Iterator[doc.Part]:
    answer = _describe_end_of_run(report)
    effort = f"{format_number_of(report.rescues, 'rescue')}, {format_number_of(report.repeated, 'step')} repeated"
    yield doc.Headline(
        words=line((answer, f"bold {_STYLES.get(report.status, 'red')}")),
        effort=f"{format_seconds(report.seconds)}, {effort}",
    )
    yield doc.Pairs(items=tuple(_list_facts(report)))
    if report.reason:
        yield doc.Paragraph(words=report.reason, whole=True)
    if report.advice:
        yield doc.Paragraph(words=f"What to do: {report.advice}", whole=True)
    if report.attempts:
        yield tabulate(ATTEMPTS, report.attempts)
        yield doc.Paragraph(words=line(("config: rung, micro batch × accumulation × ranks", "dim")), on=Medium.PAGE)
    for warning in report.warnings:
        yield doc.Paragraph(words=f"warning: {warning}", whole=True)
    if folder is not None:
        yield from _list_charts(folder, report.device_bytes)
    yield doc.Pairs(items=tuple(_list_folders(report)), whole=True)
    if report.status in ("stopped", "failed") and report.attempts:
        before = "" if report.status == "stopped" else "once that is mended, "
        yield doc.Paragraph(words=f"{before}the same command goes on")
    if report.ds_config:
        text = json.dumps(dict(report.ds_config), indent=2)
        yield doc.Details(items=(doc.Detail(summary="The last DeepSpeed config", text=text),))


def _describe_end_of_run(report: RunReport) -> str:
    """'done at step 1,000 of 1,000', 'failed at step 347 of 1,000; saved: step 300'."""
    reached = report.reached_step
    if report.status == "done" and reached == 0:  # a script that trains and saves by itself
        return _HEADLINES[report.status]
    # More were done where fewer are asked for than in the call before.
    goal = f" of {report.steps:,}" if report.steps is not None and report.steps >= reached else ""
    saved = f"; saved: step {report.step:,}" if reached != report.step else ""
    return f"{_HEADLINES[report.status]} at step {reached:,}{goal}{saved}"


def _list_facts(report: RunReport) -> Iterator[tuple[str, str]]:
    """The config of the last attempt, how the loss went, and the speed."""
    if report.rung is not None and report.knobs is not None:
        segments = ", expandable segments" if report.knobs.expandable else ""
        sizes = f"micro batch {report.knobs.micro_batch} × accumulation {report.knobs.accumulation}"
        yield (
            "config",
            f"{report.rung}, {sizes}, global batch {report.global_batch}, {describe_state(report.knobs)}{segments}",
        )
    if report.losses is not None:
        yield "loss", f"{report.losses[1]:.4g} at the end, {report.losses[0]:.4g} at the start"
    if (rate := report.samples_per_second) is not None and report.step_s is not None:
        yield (
            "speed",
            f"{format_rate(rate)} samples/s: {format_step_seconds(report.step_s)} for an optimizer step (median)",
        )


def _list_folders(report: RunReport) -> Iterator[tuple[str, str]]:
    """The checkpoint, how its weights are made, and the fit."""
    if report.checkpoint is not None:
        yield "checkpoint", report.checkpoint
        if (Path(report.checkpoint) / _TO_WEIGHTS).is_file():
            yield "weights", f"cd {shlex.quote(report.checkpoint)} && python {_TO_WEIGHTS} . weights -t state"
    if report.fit:
        yield "fit", report.fit


def _list_charts(folder: Path, device_bytes: int | None) -> Iterator[doc.Chart]:
    """What each optimizer step took and reached."""
    steps = read_steps(folder)
    for title, key, format_value in _MEASURES:
        if points := _choose_points({step: getattr(done, key) for step, done in steps.items()}):
            lines, x_name = {title: points}, "optimizer step"
            limit = device_bytes if format_value is format_bytes else None
            yield doc.Chart(
                title=title, lines=lines, format_value=format_value, x_name=x_name, logarithmic=False, limit=limit
            )


def _choose_points(values: Mapping[int, Any]) -> dict[int, float]:
    """The values that a chart can show: all, or evenly spread ones where there are many."""
    shown = {
        step: float(value) for step, value in values.items() if isinstance(value, int | float) and math.isfinite(value)
    }
    every = math.ceil(len(shown) / _MOST_POINTS) or 1
    last = max(shown, default=0)
    return {step: value for place, (step, value) in enumerate(shown.items()) if place % every == 0 or step == last}
