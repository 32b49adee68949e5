"""The report of a fit as one HTML file, which makes no request: answer, ladder, charts, certificate and every trial.

The page is the template `page.html` beside this module. Jinja escapes all text: logs and errors are the user's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..system.processes import read_tail
from ..types import TIERS, Failed, Fit, OutOfMemory, Record, Tier, TierUse
from ..units import format_bytes
from . import fit_view
from .launch import launch_lines
from .results import Report
from .serialize import write_whole
from .text import TIER_NAMES, format_outcome, format_rate, format_seconds

PAGE = "report.html"
_TAIL_BYTES = 4000  # of each log; a page stays small whatever a script prints
_MOST_LOGS = 40
_WIDTH, _HEIGHT = 640, 240  # of a chart, in its own units
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 16, 12, 40  # its margins
_OUTCOMES = {"fit": "fits", "out_of_memory": "out of memory", "failed": "failed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar of the ladder: what one tier of a rung holds, and what the forecast said, as shares of the limit."""

    tier: str
    text: str
    share: float
    forecast_share: float | None = None
    forecast_text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A point of a chart at (x, y), in the chart's units, with its words."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The points of one name in the order of x, and the number of its colour."""

    name: str
    colour: int
    points: tuple[Point, ...]

    @property
    def path(self) -> str:
        """The points as an SVG polyline has them."""
        return " ".join(f"{point.x:.1f},{point.y:.1f}" for point in self.points)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Lines over the micro batch. `ticks` are (place, words) pairs of the two axes."""

    title: str
    series: tuple[Series, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    width: int = _WIDTH
    height: int = _HEIGHT
    left: int = _LEFT
    right: int = _WIDTH - _RIGHT
    bottom: int = _HEIGHT - _BOTTOM


def render_page(report: Report, folder: Path | None = None) -> str:
    """The page of a report. `folder` is that of the fit, whose logs are quoted; None leaves them out."""
    fits = report.status == "fit"
    certificate = report.certificate
    page: str = _template().render(
        report=report,
        question=fit_view.describe_question(report),
        headline=_headline(report),
        effort=f"{len(report.trials)} trials, {format_seconds(report.seconds)}",
        answer=[(name, str(value)) for name, value in fit_view.answer_rows(report)] if fits else [],
        remedies=[] if fits else list(fit_view.remedies(report)),
        launch=list(launch_lines(report)) if fits else [],
        config=json.dumps(report.ds_config, indent=2) if report.ds_config is not None else "",
        ladder=list(_ladder(report)),
        charts=[chart for chart in (_speed_chart(report), _memory_chart(report)) if chart is not None],
        timeline=list(_timeline(report.trials)),
        forecasts=list(_forecasts(report)),
        reasons=sorted(report.reasons.items()),
        importances=sorted(report.importances.items(), key=lambda item: -item[1]),
        verdict=str(fit_view.certificate_headline(certificate)).strip() if certificate is not None else "",
        certificate=[]
        if certificate is None
        else [(name, str(text)) for name, text in fit_view.certificate_lines(certificate)],
        trials=list(_trials(report, folder)),
        versions=sorted(report.versions.items()),
        hardware=_hardware(report),
    )
    return page


def write_page(report: Report, folder: Path) -> Path:
    """Write the page into the folder of the fit; return its path. Raises the error of `errors.make_write_error`."""
    path = folder / PAGE
    write_whole(path, render_page(report, folder))
    return path


@cache
def _template() -> Any:
    environment = Environment(
        loader=PackageLoader(__package__ or "autods.report", "."), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, finalize=_make_printable,
    )  # fmt: skip
    return environment.get_template("page.html")


def _headline(report: Report) -> str:
    if report.status == "nothing_fits":
        return f"Nothing fits: {fit_view.describe_shortage(report)}"
    return f"{report.rung} {fit_view.describe_claim(report)}"


# The ladder.


def _ladder(report: Report) -> Iterator[dict[str, Any]]:
    """A row a rung: name, outcome, bars by tier, samples a second and the reason."""
    forecasts = {row["rung"]: row for row in report.forecast}
    for rung, row in fit_view.ladder_rows(report).items():
        forecast = forecasts.get(rung, {})
        if isinstance(row, str):
            refused = forecast.get("verdict") == "cannot_fit" and forecast.get("device")
            bars = [_forecast_bar(forecast["device"])] if refused else []
            yield {
                "rung": rung,
                "kind": "cannot fit" if refused else "skipped",
                "bars": bars,
                "rate": "",
                "reason": row,
            }
            continue
        outcome = row.outcome
        rate = format_rate(outcome.samples_per_second) if isinstance(outcome, Fit) else ""
        yield {
            "rung": rung,
            "kind": _OUTCOMES[outcome.kind],
            "wins": rung == report.rung,
            "bars": list(_bars(outcome, forecast if row.trial.knobs.micro_batch == 1 else {})),
            "rate": rate,
            "reason": report.reasons.get(rung) or format_outcome(outcome),
        }


def _forecast_bar(device: Mapping[str, Any]) -> Bar:
    share = device["peak_bytes"] / device["limit_bytes"] if device["limit_bytes"] else 0.0
    text = f"{format_bytes(device['peak_bytes'])} by the forecast"
    return Bar(tier=TIER_NAMES["device"], text=text, share=0.0, forecast_share=_bounded(share), forecast_text=text)


def _bars(outcome: Fit | OutOfMemory | Failed, forecast: Mapping[str, Any]) -> Iterator[Bar]:
    uses: dict[Tier, TierUse] = {}
    if isinstance(outcome, Fit):
        uses = {tier: outcome.memory[tier] for tier in TIERS if tier in outcome.memory}
    elif isinstance(outcome, OutOfMemory) and outcome.limit_bytes:
        uses = {
            outcome.tier: TierUse(
                peak_bytes=outcome.limit_bytes + (outcome.missing_bytes or 0), limit_bytes=outcome.limit_bytes
            )
        }
    for tier, use in uses.items():
        if use.peak_bytes is None or not use.limit_bytes:
            continue
        expected = (forecast.get(tier) or {}).get("peak_bytes")
        yield Bar(
            tier=TIER_NAMES[tier],
            text=f"{format_bytes(use.peak_bytes)} of {format_bytes(use.limit_bytes)}",
            share=_bounded(use.peak_bytes / use.limit_bytes),
            forecast_share=None if expected is None else _bounded(expected / use.limit_bytes),
            forecast_text="" if expected is None else f"forecast {format_bytes(expected)}",
        )


def _bounded(share: float) -> float:
    """A share as a percentage that a bar can have; what exceeds the limit goes a little beyond it."""
    return round(100 * min(max(share, 0.0), 1.2) / 1.2, 1)


# The charts.


def _speed_chart(report: Report) -> Chart | None:
    return _chart("samples/s by micro batch", report, lambda fit: fit.samples_per_second, format_rate)


def _memory_chart(report: Report) -> Chart | None:
    def device_bytes(fit: Fit) -> float:
        use = fit.memory.get("device")
        return float(use.peak_bytes or 0) if use is not None else 0.0

    return _chart("device memory by micro batch", report, device_bytes, lambda size: format_bytes(int(size)))


def _chart(
    title: str, report: Report, read: Callable[[Fit], float], format_value: Callable[[float], str]
) -> Chart | None:
    """A line for each rung over its measured micro batches, with and without checkpointing; None for one size."""
    values: dict[str, dict[int, float]] = {}
    for record in report.trials:
        if isinstance(record.outcome, Fit) and record.trial.exam is None and record.trial.limited:
            knobs = record.trial.knobs
            name = f"{record.trial.rung}{'' if knobs.checkpointing else ', no checkpointing'}"
            values.setdefault(name, {})[knobs.micro_batch] = read(record.outcome)
    sizes = sorted({size for points in values.values() for size in points})
    if len(sizes) < 2:
        return None
    highest = max(value for points in values.values() for value in points.values()) or 1.0
    low, high = math.log2(sizes[0]), math.log2(sizes[-1])

    def x(size: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (math.log2(size) - low) / (high - low)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / highest

    series = tuple(
        Series(
            name=name,
            colour=number % 8,
            points=tuple(
                Point(x=x(size), y=y(value), text=f"{name}, micro batch {size}: {format_value(value)}")
                for size, value in sorted(points.items())
            ),
        )
        for number, (name, points) in enumerate(values.items())
    )
    shown = sizes if len(sizes) <= 8 else [*sizes[:: math.ceil(len(sizes) / 7)], sizes[-1]]
    return Chart(
        title=title,
        series=series,
        x_ticks=tuple((x(size), str(size)) for size in dict.fromkeys(shown)),
        y_ticks=tuple((y(highest * part / 4), format_value(highest * part / 4) if part else "0") for part in range(5)),
    )


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


def _forecasts(report: Report) -> Iterator[tuple[str, str, str, str]]:
    """(rung, forecast, measured, difference) of the device's peak at micro batch 1."""
    peaks = {row["rung"]: row["device"]["peak_bytes"] for row in report.forecast if row.get("device")}
    for record in report.trials:
        use = record.outcome.memory.get("device") if isinstance(record.outcome, Fit) else None
        rung = record.trial.rung
        if record.trial.purpose == "walk" and rung in peaks and use is not None and use.peak_bytes:
            expected = peaks.pop(rung)
            difference = f"{(expected / use.peak_bytes - 1):+.1%}".replace("-", "−")
            yield rung, format_bytes(expected), format_bytes(use.peak_bytes), difference


# The trials.


def _trials(report: Report, folder: Path | None) -> Iterator[dict[str, Any]]:
    """Each trial with its knobs, its outcome, and the end of the log of a trial that failed."""
    logs = 0
    for record in report.trials:
        outcome, knobs = record.outcome, record.trial.knobs
        settings = {"checkpointing": knobs.checkpointing, "accumulation": knobs.accumulation, **knobs.settings}
        log = ""
        if folder is not None and not isinstance(outcome, Fit) and logs < _MOST_LOGS:
            logs += 1
            name = f"{record.id:03d}-{record.trial.rung}"
            log = read_tail(folder / "logs" / name / f"rank{max(0, outcome.rank)}.log", _TAIL_BYTES)
        yield {
            "id": record.id,
            "rung": record.trial.rung,
            "micro_batch": knobs.micro_batch,
            "purpose": record.trial.purpose,
            "kind": outcome.kind,
            "outcome": format_outcome(outcome),
            "seconds": format_seconds(record.seconds),
            "settings": ", ".join(f"{key} {value}" for key, value in settings.items()),
            "evidence": "" if isinstance(outcome, Fit) else outcome.evidence,
            "advice": "" if isinstance(outcome, Fit) else outcome.advice,
            "log": log,
        }


def _make_printable(value: object) -> object:
    """A value of the template; text loses its control characters other than line ends and tabs."""
    if not isinstance(value, str) or value.isprintable():
        return value
    return "".join(letter for letter in value if letter in "\n\t" or letter.isprintable())


def _hardware(report: Report) -> list[tuple[str, str]]:
    hardware = report.hardware
    if hardware is None:
        return []
    cards: Iterable[str] = (f"{card.name} ({format_bytes(card.total_bytes)})" for card in hardware.cards)
    return [
        ("processor", f"{hardware.cpu}, {hardware.cores} cores"),
        ("host memory", format_bytes(hardware.host_bytes)),
        ("cards", ", ".join(cards) or "none"),
        ("driver", hardware.driver or "none"),
    ]
