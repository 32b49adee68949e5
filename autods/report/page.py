"""The report of a fit as one HTML file, which makes no request: answer, ladder, charts, certificate and every trial.

The page is the template `page.html` beside this module.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..forecast.values import RungForecast
from ..types import TIERS, Failed, Fit, OutOfMemory, Record, Tier, TierUse
from ..units import format_bytes
from . import fit_view
from .html_parts import (
    PAGE,
    Chart,
    StackedBar,
    describe_hardware,
    draw_chart,
    list_trials,
    place_on_bar,
    render,
    stack_memory,
)
from .launch import launch_lines
from .results.fit import FitReport
from .serialize import write_whole
from .text import TIER_NAMES, format_outcome, format_rate, format_seconds

_OUTCOMES = {"fit": "fits", "out_of_memory": "out of memory", "failed": "failed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar of the ladder: what one tier of a rung held, as a share of the bar in percent, see `place_on_bar`."""

    tier: str
    text: str
    share: float


def render_page(report: FitReport, folder: Path | None = None) -> str:
    """The page of a report. `folder` is that of the fit, whose logs are quoted; None leaves them out."""
    fits = report.status == "fit"
    certificate = report.certificate
    ladder = list(_ladder(report))
    return render(
        "page.html",
        title=report.question.workload,
        question=fit_view.describe_question(report),
        headline=_headline(report),
        effort=fit_view.describe_effort(report),
        answer=[(name, str(value)) for name, value in fit_view.answer_rows(report)] if fits else [],
        remedies=[] if fits else list(fit_view.remedies(report)),
        launch=list(launch_lines(report)) if fits else [],
        config=json.dumps(report.ds_config, indent=2) if report.ds_config is not None else "",
        ladder=ladder,
        has_stacks=any(row["stack"] is not None for row in ladder),
        charts=[chart for chart in (_speed_chart(report), _memory_chart(report)) if chart is not None],
        timeline=list(_timeline(report.trials)),
        forecasts=list(_forecasts(report)),
        reasons=sorted(report.reasons.items()),
        tuning=_tuning_chart(report),
        importances=[(key, f"{share:.0%}") for key, share in sorted(report.importances.items(), key=lambda i: -i[1])],
        verdict=str(fit_view.certificate_headline(certificate)).strip() if certificate is not None else "",
        certificate=[]
        if certificate is None
        else [(name, str(text)) for name, text in fit_view.certificate_lines(certificate)],
        trials=list(list_trials(report.trials, folder)),
        machine=[*describe_hardware(report.hardware), *sorted(report.versions.items())],
    )


def write_page(report: FitReport, folder: Path) -> Path:
    """Write the page into the folder of the fit; return its path. Raises the error of `errors.make_write_error`."""
    path = folder / PAGE
    write_whole(path, render_page(report, folder))
    return path


def _headline(report: FitReport) -> str:
    if report.status == "nothing_fits":
        return f"Nothing fits: {fit_view.describe_shortage(report)}"
    return f"{report.rung} {fit_view.describe_claim(report)}"


# The ladder.


def _ladder(report: FitReport) -> Iterator[dict[str, Any]]:
    """A row a rung: name, outcome, measured peaks, the forecast by kind, samples a second and the reason."""
    forecasts = {forecast.rung: forecast for forecast in report.forecast}
    for rung, row in fit_view.ladder_rows(report).items():
        forecast = forecasts.get(rung)
        cells: dict[str, Any] = {"rung": rung, "wins": rung == report.rung, "bars": [], "rate": ""}
        cells["stack"] = None if forecast is None or "device" not in forecast.memory else _stack(report, forecast)
        if isinstance(row, str):
            kind = "cannot fit" if forecast is not None and forecast.verdict == "cannot_fit" else "skipped"
            yield cells | {"kind": kind, "reason": row}
            continue
        outcome = row.outcome
        yield cells | {
            "kind": _OUTCOMES[outcome.kind],
            "bars": list(_bars(outcome)),
            "rate": _format_row_rate(report, row),
            "reason": report.reasons.get(rung) or format_outcome(outcome),
        }


def _format_row_rate(report: FitReport, row: Record) -> str:
    """The speed of a row's trial; for the winner that of the answer, where several trials of it were measured."""
    if row.trial.rung == report.rung and report.throughput is not None:
        return format_rate(report.throughput.samples_per_second)
    return format_rate(row.outcome.samples_per_second) if isinstance(row.outcome, Fit) else ""


def _stack(report: FitReport, forecast: RungForecast) -> StackedBar:
    """The forecast of a rung's first trial, and what that trial measured if it fitted."""
    use = None
    for record in report.trials:
        trial = record.trial
        if trial.rung == forecast.rung and trial.purpose == "walk" and trial.knobs.micro_batch == forecast.micro_batch:
            use = record.outcome.memory.get("device") if isinstance(record.outcome, Fit) else None
            break
    return stack_memory(
        forecast,
        micro_batch=forecast.micro_batch,
        measured_bytes=None if use is None else use.peak_bytes,
        limit_bytes=None if use is None else use.limit_bytes,
    )


def _bars(outcome: Fit | OutOfMemory | Failed) -> Iterator[Bar]:
    uses: dict[Tier, TierUse] = {}
    if isinstance(outcome, Fit):
        uses = {tier: outcome.memory[tier] for tier in TIERS if tier in outcome.memory}
    elif isinstance(outcome, OutOfMemory) and outcome.limit_bytes:
        needed = outcome.limit_bytes + (outcome.missing_bytes or 0)
        uses = {outcome.tier: TierUse(peak_bytes=needed, limit_bytes=outcome.limit_bytes)}
    for tier, use in uses.items():
        if use.peak_bytes is None or not use.limit_bytes:
            continue
        bound = "" if isinstance(outcome, Fit) else "at least "
        text = f"{bound}{format_bytes(use.peak_bytes)} of {format_bytes(use.limit_bytes)}"
        yield Bar(tier=TIER_NAMES[tier], text=text, share=place_on_bar(use.peak_bytes / use.limit_bytes))


# The charts.


def _speed_chart(report: FitReport) -> Chart | None:
    return _chart("samples/s by micro batch", report, lambda fit: fit.samples_per_second, format_rate)


def _memory_chart(report: FitReport) -> Chart | None:
    def device_bytes(fit: Fit) -> float:
        use = fit.memory.get("device")
        return float(use.peak_bytes or 0) if use is not None else 0.0

    return _chart("device memory by micro batch", report, device_bytes, lambda size: format_bytes(int(size)))


def _chart(
    title: str, report: FitReport, read: Callable[[Fit], float], format_value: Callable[[float], str]
) -> Chart | None:
    """A line for each rung over its measured micro batches, with and without checkpointing; None for one size."""
    values: dict[str, dict[int, float]] = {}
    for record in report.trials:
        if isinstance(record.outcome, Fit) and record.trial.exam is None and record.trial.limited:
            knobs = record.trial.knobs
            name = f"{record.trial.rung}{'' if knobs.checkpointing else ', no checkpointing'}"
            values.setdefault(name, {})[knobs.micro_batch] = read(record.outcome)
    return draw_chart(title, values, format_value)


def _tuning_chart(report: FitReport) -> Chart | None:
    """Each trial of tuning that fitted, and the best of those so far; None for fewer than two."""
    by_memory = report.question.objective == "memory"
    measured: dict[int, float] = {}
    for record in report.trials:
        if record.trial.purpose == "tune" and isinstance(record.outcome, Fit):
            fit = record.outcome
            measured[record.id] = float(fit.device_peak_bytes) if by_memory else fit.samples_per_second
    choose = min if by_memory else max
    best = dict(zip(measured, itertools.accumulate(measured.values(), choose), strict=True))
    if by_memory:
        title, words = "Tuning: device memory by trial", lambda size: format_bytes(int(size))
    else:
        title, words = "Tuning: samples/s by trial", format_rate
    lines = {"best so far": best, "trial": measured}
    return draw_chart(title, lines, words, x_name="trial", logarithmic=False, without_line="trial")


def _timeline(records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    """The trials one after the other: place and width in percent of the time that all of them took."""
    total = sum(record.seconds for record in records) or 1.0
    began = 0.0
    for record in records:
        words = f"trial {record.id}: {record.trial.rung}, {record.trial.purpose}, {format_seconds(record.seconds)}"
        yield {
            "left": 100 * began / total,
            "width": 100 * record.seconds / total,
            "kind": record.outcome.kind,
            "text": words,
        }
        began += record.seconds


def _forecasts(report: FitReport) -> Iterator[tuple[str, str, str, str]]:
    """(rung, forecast, measured, difference) of the device's peak at micro batch 1."""
    peaks = {
        forecast.rung: forecast.memory["device"].peak_bytes
        for forecast in report.forecast
        if "device" in forecast.memory
    }
    for record in report.trials:
        use = record.outcome.memory.get("device") if isinstance(record.outcome, Fit) else None
        rung = record.trial.rung
        if record.trial.purpose == "walk" and rung in peaks and use is not None and use.peak_bytes:
            expected = peaks.pop(rung)
            difference = f"{(expected / use.peak_bytes - 1):+.1%}".replace("-", "−")
            yield rung, format_bytes(expected), format_bytes(use.peak_bytes), difference
