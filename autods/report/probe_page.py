"""The report of a probe as one HTML file, which makes no request: the answer, every cell, charts and every trial."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..types import TIERS, Scalar
from ..units import format_bytes
from .html_parts import PAGE, Chart, describe_hardware, draw_chart, list_trials, place_on_bar, render
from .probe_view import describe_question, list_columns, list_conclusions, list_reasons
from .results.probe import CellResult, ProbeReport
from .serialize import write_whole
from .text import MARKS, TIER_NAMES, format_rate, format_use

_CLASSES = {"fit": "good", "out_of_memory": "fair", "failed": "bad", "refused": "dim"}
_MOST_LINES = 8  # of a chart


def render_probe_page(report: ProbeReport, folder: Path | None = None) -> str:
    """The page of a probe. `folder` is that of the probe, whose logs are quoted; None leaves them out."""
    conclusion, *remarks = (str(text) for text in list_conclusions(report))
    headline, _, effort = conclusion.partition("  (")
    columns = list_columns(report)
    return render(
        "probe_page.html",
        title=report.question.workload,
        headline=headline,
        question=describe_question(report),
        effort=effort.rstrip(")"),
        remarks=remarks,
        columns=[(column.name.replace("\n", " ").replace("_ ", "_"), column.right) for column in columns],
        cells=[
            {
                "class": _CLASSES[cell.status],
                "outcome": MARKS[cell.status].word,
                "texts": [(str(column.cell(cell)), column.right) for column in columns],
            }
            for cell in report.cells
        ],
        charts=[chart for chart in _charts(report) if chart is not None],
        memory=list(_memory(report)),
        reasons=[(cells, str(reason)) for cells, reason in list_reasons(report)],
        notes=list(report.notes),
        trials=list(list_trials(report.trials, folder)),
        machine=[*describe_hardware(report.hardware), *sorted(report.versions.items())],
    )


def write_probe_page(report: ProbeReport, folder: Path) -> Path:
    """Write the page into the folder of the probe; return its path. Raises like `serialize.write_whole`."""
    path = folder / PAGE
    write_whole(path, render_probe_page(report, folder))
    return path


def _charts(report: ProbeReport) -> Iterator[Chart | None]:
    """Speed, device memory or the largest micro batch over each axis of whole numbers, a line for each other value."""
    for axis, values in report.axes.items():
        if len(values) < 2 or not all(_is_whole(value) and value > 0 for value in values):  # type: ignore[operator]
            continue
        speeds: dict[str, dict[int, float]] = {}
        sizes: dict[str, dict[int, float]] = {}
        capacities: dict[str, dict[int, float]] = {}
        for cell in report.cells:
            place = cell.values.get(axis)
            if not isinstance(place, int) or cell.status != "fit":
                continue
            name = _name_of_others(report, cell, axis)
            if cell.samples_per_second is not None:
                speeds.setdefault(name, {})[place] = cell.samples_per_second
            if (use := cell.memory.get("device")) is not None:
                sizes.setdefault(name, {})[place] = float(use.peak_bytes)
            capacity = cell.capacity
            if capacity is not None and (most := capacity.verified or capacity.forecast) is not None:
                capacities.setdefault(name, {})[place] = float(most)
        for title, lines, words in (
            (f"samples/s by {axis}", speeds, format_rate),
            (f"device memory by {axis}", sizes, lambda size: format_bytes(int(size))),
            (f"largest micro batch by {axis}", capacities, lambda most: f"{most:.0f}"),
        ):
            yield draw_chart(title, dict(list(lines.items())[:_MOST_LINES]), words, x_name=axis)


def _is_whole(value: Scalar | None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _name_of_others(report: ProbeReport, cell: CellResult, axis: str) -> str:
    """'zero2, seq_len 64': the values of the other axes that vary."""
    others = [name for name, values in report.axes.items() if name != axis and len(values) > 1]
    named = (str(cell.values[name]) if name == "rung" else f"{name} {cell.values[name]}" for name in others)
    return ", ".join(named) or report.question.workload


def _memory(report: ProbeReport) -> Iterator[dict[str, Any]]:
    """The peaks of each cell that ran, as bars where a limit is known."""
    for cell in report.cells:
        if cell.same_as is None and cell.memory:
            bars = [
                {
                    "text": f"{TIER_NAMES[tier]} {format_use(use)}",
                    "share": place_on_bar(use.peak_bytes / use.limit_bytes) if use.limit_bytes else None,
                }
                for tier in TIERS
                if (use := cell.memory.get(tier)) is not None and use.peak_bytes
            ]
            yield {"cell": cell.number, "bars": bars}
