"""Documents as pages: one HTML file each, which makes no request.

Jinja escapes all text: logs and errors are the user's. The template `page.html` beside this module shows each part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ..units import format_bytes
from . import document as doc
from .document import MEMORY_KINDS, Chart, Medium, MemoryStack, Words, list_pieces, list_spans
from .serialize import write_whole

PAGE, RUN_PAGE = "report.html", "run.html"
_CLASSES = {"green": "good", "yellow": "fair", "red": "bad", "dim": "dim", "bold": "strong"}  # by style of a line
_WIDTH, _HEIGHT = 640, 240  # of a chart, in its own units
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 16, 12, 40  # its margins
_BEYOND = 1.2  # a bar's whole length, as a multiple of the limit


def write_page(document: doc.Document, path: Path) -> Path:
    """Write the page to a file; return its path. Raises the error of `errors.make_write_error`."""
    write_whole(path, to_page(document))
    return path


def to_page(document: doc.Document) -> str:
    """The document as a page. Its first headline comes first."""
    parts = [part for part in document.parts if Medium.PAGE in part.on]
    headline = next((part for part in parts if isinstance(part, doc.Headline)), None)
    page: str = (
        _environment()
        .get_template("page.html")
        .render(
            title=document.title,
            question=document.question,
            headline=headline,
            parts=[part for part in parts if part is not headline],
            medium=Medium.PAGE,
            kinds=[kind.name for kind in MEMORY_KINDS.values()],
        )
    )
    return page


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader(__package__ or "autods.report", "."), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, finalize=_make_printable,
    )  # fmt: skip
    environment.filters |= {
        "name_kind": _name_kind,
        "spans": _list_spans,
        "pieces": list_pieces,
        "draw": draw_chart,
        "stack": draw_stack,
        "place": place_on_bar,
    }
    return environment


def _name_kind(value: doc.Part | doc.Piece) -> str:
    """'Table', 'Gauge': which macro shows it."""
    return type(value).__name__


def _list_spans(words: Words) -> list[tuple[str, str]]:
    """(classes, text) of each piece of a line."""
    spans = list_spans(words)
    return [(" ".join(_CLASSES[word] for word in style.split() if word in _CLASSES), text) for text, style in spans]


def _make_printable(value: object) -> object:
    """A value of the template; text loses its control characters other than line ends and tabs."""
    if isinstance(value, Markup) or not isinstance(value, str) or value.isprintable():
        return value  # Markup comes from macros, whose values were made printable there
    return "".join(letter for letter in value if letter in "\n\t" or letter.isprintable())


# Drawings.


class Segment(NamedTuple):
    """A part of a bar: its place and width in percent, the number of its colour, its words."""

    left: float
    width: float
    colour: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedBar:
    """A bar of device memory by kind. Places are percents of the bar.

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


def draw_stack(stack: MemoryStack) -> StackedBar:
    """The bar of a rung's device memory, 1.2 times as long as the limit, or as long as holds all."""
    forecast, limit, measured = stack.forecast, stack.limit_bytes, stack.measured_bytes
    device = forecast.memory["device"]
    whole: float = max(_BEYOND * limit, device.high_bytes, measured or 0)

    def place(size: float) -> float:
        return round(100 * size / whole, 1)

    ends = itertools.accumulate(stack.sizes.values())
    segments = []
    for colour, ((kind, size), end) in enumerate(zip(stack.sizes.items(), ends, strict=True)):
        left, right = place(end - size), place(end)
        text = f"{MEMORY_KINDS[kind].name}: {format_bytes(size)}"
        segments.append(Segment(left=left, width=round(right - left, 1), colour=colour, text=text))
    text = f"forecast at micro batch {forecast.micro_batch}: {device}"
    text += f" of {format_bytes(limit)}" if limit != device.peak_bytes else ""
    if measured:
        difference = f"{device.peak_bytes / measured - 1:+.1%}".replace("-", "−")
        text += f", measured {format_bytes(measured)}, a difference of {difference}"
    return StackedBar(
        text=text,
        segments=tuple(segment for segment in segments if segment.width > 0),
        low=place(device.low_bytes),
        high=place(device.high_bytes),
        limit=place(limit),
        mark=None if measured is None else place(measured),
    )


class ChartPoint(NamedTuple):
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
class Drawing:
    """A chart in its own units. `x_ticks` and `y_ticks` are (place, words) pairs of the two axes."""

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


def draw_chart(chart: Chart) -> Drawing:
    """Draw the lines of a chart, which have two places or more."""
    places = sorted({place for points in chart.lines.values() for place in points})
    highest = max(value for points in chart.lines.values() for value in points.values()) or 1.0
    scale: Callable[[float], float] = math.log2 if chart.logarithmic else float
    low, high = scale(places[0]), scale(places[-1])

    def x(place: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (scale(place) - low) / (high - low)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / highest

    def word(value: float) -> str:
        return chart.format_value(value) if value else "0"

    series = tuple(
        Series(
            name=name,
            colour=number % 8,
            points=tuple(
                ChartPoint(x=x(place), y=y(value), text=f"{name}, {chart.x_name} {place}: {chart.format_value(value)}")
                for place, value in sorted(points.items())
            ),
            has_line=name != chart.dots,
        )
        for number, (name, points) in enumerate(chart.lines.items())
    )
    shown = places if len(places) <= 8 else [*places[:: math.ceil(len(places) / 7)], places[-1]]
    return Drawing(
        title=chart.title,
        x_name=chart.x_name,
        series=series,
        x_ticks=tuple((x(place), str(place)) for place in dict.fromkeys(shown)),
        y_ticks=tuple((y(highest * part / 4), word(highest * part / 4)) for part in range(5)),
    )
