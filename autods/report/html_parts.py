"""What the pages of a fit, a plan and a probe share: the templates, memory bars, charts, trials and the machine.

Jinja escapes all text: logs and errors are the user's. A page is one file that makes no request.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ..forecast.values import RungForecast
from ..system.host import Hardware
from ..system.processes import read_tail
from ..types import Fit, Record
from ..units import format_bytes
from .text import format_outcome, format_seconds

PAGE = "report.html"
_TAIL_BYTES = 4000  # of each log; a page stays small whatever a script prints
_MOST_LOGS = 40
_WIDTH, _HEIGHT = 640, 240  # of a chart, in its own units
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 16, 12, 40  # its margins
_BEYOND = 1.2  # a bar's whole length, as a multiple of the limit
# What a rung's device memory is made of, in the order of a bar, as the forecast names it and as people read it.
MEMORY_KINDS: Mapping[str, str] = {
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "buckets": "buffers",
    "other": "other tensors",
    "outside": "outside of tensors: allocator, context, libraries",
}


def render(template: str, **values: Any) -> str:
    """The page of a template beside this module."""
    page: str = _environment().get_template(template).render(kinds=list(MEMORY_KINDS.values()), **values)
    return page


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader(__package__ or "autods.report", "."), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, finalize=_make_printable,
    )  # fmt: skip


def _make_printable(value: object) -> object:
    """A value of the template; text loses its control characters other than line ends and tabs."""
    if isinstance(value, Markup) or not isinstance(value, str) or value.isprintable():
        return value  # Markup comes from the macros of parts.html, whose values were made printable there
    return "".join(letter for letter in value if letter in "\n\t" or letter.isprintable())


# Memory bars.


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a stacked bar: its place and width in percent of the bar, the number of its colour, its words."""

    left: float
    width: float
    colour: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedBar:
    """The forecast of a rung's device memory by kind. Places are percents of the bar.

    `low` and `high` bound the forecast. `mark` is the measured peak, None where nothing was measured.
    """

    text: str
    segments: tuple[Segment, ...]
    low: float
    high: float
    limit: float
    mark: float | None = None


def place_on_bar(share: float) -> float:
    """The place of a share of the limit, in percent of a bar; what exceeds the limit goes a little beyond it."""
    return round(100 * min(max(share, 0.0), _BEYOND) / _BEYOND, 1)


def stack_memory(
    forecast: RungForecast,
    *,
    micro_batch: int | None = None,
    measured_bytes: int | None = None,
    limit_bytes: int | None = None,
) -> StackedBar:
    """The bar of a rung's device memory, and the peak that a trial measured.

    Where `micro_batch` is given, its text begins with that. The bar is 1.2 times as long as the limit, or holds all.
    `limit_bytes` is that of the trial; without one it is the forecast's, and without that the peak.
    """
    device = forecast.memory["device"]
    peak = device.peak_bytes
    limit = limit_bytes or device.limit_bytes or peak or 1
    sizes = {kind: forecast.breakdown.get(kind, 0) for kind in MEMORY_KINDS}
    sizes["outside"] = max(0, peak - sum(sizes.values()))
    whole: float = max(_BEYOND * limit, device.high_bytes, measured_bytes or 0)

    def place(size: float) -> float:
        return round(100 * size / whole, 1)

    ends = itertools.accumulate(sizes.values())
    segments = []
    for colour, ((kind, size), end) in enumerate(zip(sizes.items(), ends, strict=True)):
        left, right = place(end - size), place(end)
        text = f"{MEMORY_KINDS[kind]}: {format_bytes(size)}"
        segments.append(Segment(left=left, width=round(right - left, 1), colour=colour, text=text))
    text = str(device)
    if limit != peak:
        text += f" of {format_bytes(limit)}"
    if micro_batch is not None:
        text = f"forecast at micro batch {micro_batch}: {text}"
    if measured_bytes is not None:
        text += f", measured {format_bytes(measured_bytes)}"
    return StackedBar(
        text=text,
        segments=tuple(segment for segment in segments if segment.width > 0),
        low=place(device.low_bytes),
        high=place(device.high_bytes),
        limit=place(limit),
        mark=None if measured_bytes is None else place(measured_bytes),
    )


# Charts.


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartPoint:
    """A point of a chart at (x, y), in the chart's units, with its words."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The points of one name in the order of x, and the number of its colour. Points may stand without a line."""

    name: str
    colour: int
    points: tuple[ChartPoint, ...]
    has_line: bool = True

    @property
    def path(self) -> str:
        """The points as an SVG polyline has them."""
        return " ".join(f"{point.x:.1f},{point.y:.1f}" for point in self.points)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Lines over `x_name`. `ticks` are (place, words) pairs of the two axes."""

    title: str
    x_name: str
    series: tuple[Series, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    width: int = _WIDTH
    height: int = _HEIGHT
    left: int = _LEFT
    right: int = _WIDTH - _RIGHT
    bottom: int = _HEIGHT - _BOTTOM


def draw_chart(
    title: str,
    lines: Mapping[str, Mapping[int, float]],
    format_value: Callable[[float], str],
    *,
    x_name: str = "micro batch",
    logarithmic: bool = True,
    without_line: str | None = None,
) -> Chart | None:
    """Lines by name, each of values by their x, from 0 up. None where all have one x. x is above 0 if `logarithmic`."""
    places = sorted({place for points in lines.values() for place in points})
    if len(places) < 2:
        return None
    highest = max(value for points in lines.values() for value in points.values()) or 1.0
    scale: Callable[[float], float] = math.log2 if logarithmic else float
    low, high = scale(places[0]), scale(places[-1])

    def x(place: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (scale(place) - low) / (high - low)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / highest

    series = tuple(
        Series(
            name=name,
            colour=number % 8,
            points=tuple(
                ChartPoint(x=x(place), y=y(value), text=f"{name}, {x_name} {place}: {format_value(value)}")
                for place, value in sorted(points.items())
            ),
            has_line=name != without_line,
        )
        for number, (name, points) in enumerate(lines.items())
    )
    shown = places if len(places) <= 8 else [*places[:: math.ceil(len(places) / 7)], places[-1]]
    return Chart(
        title=title,
        x_name=x_name,
        series=series,
        x_ticks=tuple((x(place), str(place)) for place in dict.fromkeys(shown)),
        y_ticks=tuple((y(highest * part / 4), format_value(highest * part / 4) if part else "0") for part in range(5)),
    )


# Trials, and the machine.


def list_trials(records: Sequence[Record], folder: Path | None) -> Iterator[dict[str, Any]]:
    """Each trial with its knobs, its outcome, and the end of the log of a trial that failed.

    `folder` is that of the fit or the probe; None leaves out the logs.
    """
    logs = 0
    for record in records:
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
            "settings": ", ".join(f"{key} {value}" for key, value in {**settings, **record.trial.conditions}.items()),
            "evidence": "" if isinstance(outcome, Fit) else outcome.evidence,
            "advice": "" if isinstance(outcome, Fit) else outcome.advice,
            "log": log,
        }


def describe_hardware(hardware: Hardware | None) -> list[tuple[str, str]]:
    """The machine as (name, words) pairs; none where it is not known."""
    if hardware is None:
        return []
    cards: Iterable[str] = (f"{card.name} ({format_bytes(card.total_bytes)})" for card in hardware.cards)
    return [
        ("processor", f"{hardware.cpu}, {hardware.cores} cores"),
        ("host memory", format_bytes(hardware.host_bytes)),
        ("cards", ", ".join(cards) or "none"),
        ("driver", hardware.driver or "none"),
    ]
