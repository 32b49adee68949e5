"""The geometry of a page's drawings: charts of lines over an axis, and stacked bars of memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..units import format_bytes
from .document import MEMORY_KINDS, Chart, MemoryStack

_WIDTH, _HEIGHT = 640, 240  # of a chart, in its own units
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 16, 12, 40  # its margins
_BEYOND = 1.2  # a bar's whole length, as a multiple of the limit


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
