"""Documents as pages: one HTML file each, which makes no request.

Jinja escapes all text: logs and errors are the user's. The template `page.html` beside this module shows each part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ..files import write_whole
from ..units import format_bytes
from . import document as doc
from .document import MEMORY_KINDS, Chart, Medium, MemoryStack, Words, list_pieces, list_spans

PAGE, RUN_PAGE = "report.html", "run.html"
PAGE_BEGINS = (b"<!doctype html",)
_CLASSES = {"green": "good", "yellow": "fair", "red": "bad", "dim": "dim", "bold": "strong"}  # by style of a line
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 624, 12, 200  # where the axes of a chart lie in its 640 × 240 units
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
            kinds=MEMORY_KINDS,
            axes={"left": _LEFT, "right": _RIGHT, "bottom": _BOTTOM},
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
        "describe_stack": describe_stack,
        "measure_stack": measure_stack,
        "place": place_on_bar,
        "bytes": format_bytes,
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


def place_on_bar(share: float) -> float:
    """The place of a share of the limit, in percent of a bar; what exceeds the limit goes a little beyond it."""
    return round(100 * min(max(share, 0.0), _BEYOND) / _BEYOND, 1)


def describe_stack(stack: MemoryStack) -> str:
    """The forecast of a rung's device memory, and the measured peak beside it."""
    device, measured = stack.forecast.memory["device"], stack.measured_bytes
    text = f"forecast at micro batch {stack.forecast.micro_batch}: {device}"
    text += f" of {format_bytes(stack.limit_bytes)}" if stack.limit_bytes != device.peak_bytes else ""
    if not measured:
        return text
    difference = f"{device.peak_bytes / measured - 1:+.1%}".replace("-", "−")
    return f"{text}, measured {format_bytes(measured)}, a difference of {difference}"


def measure_stack(stack: MemoryStack) -> float:
    """The bytes that a rung's whole bar stands for: 1.2 times the limit, or what holds all."""
    return max(_BEYOND * stack.limit_bytes, stack.forecast.memory["device"].high_bytes, stack.measured_bytes or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A chart in its own units: (x, y, words) of each point, in the order of x, and (place, words) along both axes."""

    points: Mapping[str, tuple[tuple[float, float, str], ...]]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]


def draw_chart(chart: Chart) -> Drawing:
    """Place the lines of a chart, which have two places or more."""
    places = sorted({place for points in chart.lines.values() for place in points})
    highest = max(value for points in chart.lines.values() for value in points.values()) or 1.0
    scale: Callable[[float], float] = math.log2 if chart.logarithmic else float
    low, high = scale(places[0]), scale(places[-1])

    def x(place: int) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * (scale(place) - low) / (high - low), 1)

    def y(value: float) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * value / highest, 1)

    points = {
        name: tuple(
            (x(place), y(value), f"{name}, {chart.x_name} {place}: {chart.format_value(value)}")
            for place, value in sorted(line.items())
        )
        for name, line in chart.lines.items()
    }
    shown = places if len(places) <= 8 else [*places[:: math.ceil(len(places) / 7)], places[-1]]
    heights = [highest * part / 4 for part in range(5)]
    return Drawing(
        points=points,
        x_ticks=tuple((x(place), str(place)) for place in dict.fromkeys(shown)),
        y_ticks=tuple((y(height), chart.format_value(height) if height else "0") for height in heights),
    )
