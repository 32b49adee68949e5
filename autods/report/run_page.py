"""A training run as one HTML file, which makes no request: its attempts, what was changed, charts over its steps."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..units import format_bytes
from .html_parts import draw_chart, render
from .results.run import RunReport, read_steps
from .run_view import count_noun, describe_attempt, describe_headline
from .serialize import write_whole
from .text import format_seconds

RUN_PAGE = "run.html"
_MOST_POINTS = 60  # of a chart
_CLASSES = {"done": "good", "stopped": "fair", "interrupted": "fair"}


def render_run_page(report: RunReport, folder: Path) -> str:
    """The page of a run. The charts are of the steps that its folder has on record."""
    steps = read_steps(folder)
    lines = {
        "loss": ({step: row["loss"] for step, row in steps.items()}, lambda loss: f"{loss:.4g}"),
        "seconds of a step": (
            {step: row["seconds"] for step, row in steps.items()},
            lambda seconds: f"{seconds:.3g} s",
        ),
        "device memory of rank 0, the peak": (
            {step: row.get("device_peak_bytes") for step, row in steps.items()},
            lambda size: format_bytes(int(size)),
        ),
    }
    charts = (
        draw_chart(title, {title: drawn}, words, x_name="optimizer step", logarithmic=False)
        for title, (values, words) in lines.items()
        if (drawn := _choose_points(values))
    )
    return render(
        "run_page.html",
        title=folder.resolve().name,
        headline=describe_headline(report),
        effort=(
            f"{format_seconds(report.seconds)}, {count_noun(report.rescues, 'rescue')}, "
            f"{count_noun(report.repeated, 'step')} repeated"
        ),
        reason=report.reason,
        advice=report.advice,
        attempts=[{"class": _CLASSES.get(row.ending, "bad"), **describe_attempt(row)} for row in report.attempts],
        warnings=report.warnings,
        charts=[chart for chart in charts if chart is not None],
        files=[(name, str(path)) for name, path in (("checkpoint", report.checkpoint), ("fit", report.fit)) if path],
        config=json.dumps(dict(report.ds_config), indent=2) if report.ds_config else "",
    )


def write_run_page(report: RunReport, folder: Path) -> Path:
    """Write the page into the run's folder; return its path. Raises like `serialize.write_whole`."""
    path = folder / RUN_PAGE
    write_whole(path, render_run_page(report, folder))
    return path


def _choose_points(values: Mapping[int, Any]) -> dict[int, float]:
    """The values that a chart from 0 up can show: all, or evenly spread ones where there are many."""
    shown = {
        step: float(value)
        for step, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value) and value >= 0
    }
    every = math.ceil(len(shown) / _MOST_POINTS) or 1
    last = max(shown, default=0)
    return {step: value for place, (step, value) in enumerate(shown.items()) if place % every == 0 or step == last}
