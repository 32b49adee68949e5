"""Documents as pages: one HTML file each, which makes no request.

Jinja escapes all text: logs and errors are the user's. The template `page.html` beside this module shows each part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ..files import write_whole
from ..plain_text import clean
from ..units import choose_unit, format_bytes
from . import document as doc
from .document import BOUND, MEMORY_KINDS, Chart, Medium, MemoryStack, Words, list_pieces, list_spans

PAGE, RUN_PAGE = "report.html", "run.html"
PAGE_BEGINS = (b"<!doctype html",)
_CLASSES = {"green": "good", "yellow": "fair", "red": "bad", "dim": "dim", "bold": "strong"}  # by style of a line
_LEFT, _RIGHT, _TOP, _BOTTOM = 110, 940, 24, 250  # where the axes of a chart lie in its 960 × 300 units
_Y_TICKS, _X_TICKS, _X_APART = 5, 12, 40  # at most; and the least distance of two places of measurements
_LETTER = 12  # units of a chart, of a letter on a phone and some room
_COLOURS = 8  # of lines; those after them are dashed
_BEYOND, _FARTHEST = 1.2, 6.0  # a bar's whole length as a multiple of the limit: at least, and at most


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
            least_reach=_BEYOND,
            colours=_COLOURS,
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
        "reach": find_reach,
        "place": place_on_bar,
        "has_bar": _has_bar,
        "bytes": format_bytes,
    }
    return environment


def _name_kind(value: doc.Part | doc.Piece) -> str:
    """'Table', 'Gauge': which macro shows it."""
    return type(value).__name__


def _has_bar(cell: doc.Cell) -> bool:
    """Whether a cell shows a share of a limit as a bar."""
    return any(
        isinstance(piece, MemoryStack) or (isinstance(piece, doc.Gauge) and piece.share is not None)
        for piece in list_pieces(cell)
    )


def _list_spans(words: Words) -> list[tuple[str, str]]:
    """(classes, text) of each piece of a line."""
    spans = list_spans(words)
    return [
        (" ".join(_CLASSES[word] for word in style.split() if word in _CLASSES), _bind(text)) for text, style in spans
    ]


def _bind(text: str) -> str:
    """The text with spaces that hold a number and its unit together."""
    return BOUND.sub("\N{NO-BREAK SPACE}", text)


def _make_printable(value: object) -> object:
    """A value of the template; text as `plain_text.clean` has it."""
    if isinstance(value, Markup) or not isinstance(value, str) or value.isprintable():
        return value  # Markup comes from macros, whose values were made printable there
    return clean(value)


# Drawings.


def find_reach(part: doc.Table) -> float:
    """What the whole length of each bar of a table stands for, as a multiple of the limit: one scale for all."""
    shares = [_BEYOND]
    for piece in (piece for row in part.items for cell in row.cells for piece in list_pieces(cell)):
        if isinstance(piece, doc.Gauge) and piece.share is not None:
            shares.append(piece.share)
        elif isinstance(piece, MemoryStack):
            most = max(piece.forecast.memory["device"].high_bytes, piece.measured_bytes or 0)
            shares.append(most / piece.limit_bytes)
    return min(max(shares), _FARTHEST)


def place_on_bar(share: float, reach: float) -> float:
    """The place of a share of the limit, in percent of a bar of that `reach`; what is beyond it lies at its end."""
    return round(100 * min(max(share, 0.0), reach) / reach, 1)


def describe_stack(stack: MemoryStack) -> str:
    """The forecast of a rung's device memory, and the measured peak beside it."""
    device, measured = stack.forecast.memory["device"], stack.measured_bytes
    text = f"forecast at micro batch {stack.forecast.micro_batch}: {device}"
    text += f" of {format_bytes(stack.limit_bytes)}" if stack.limit_bytes != device.peak_bytes else ""
    if not measured:
        return _bind(text)
    difference = f"{device.peak_bytes / measured - 1:+.1%}".replace("-", "−")
    return _bind(f"{text}, measured {format_bytes(measured)}, a difference of {difference}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A chart in its own units: (x, y, words) of each point, in the order of x, and (place, words) along both axes.

    `limit` is the (y, words) of a limit, if there is one. `summary` is for those who do not see the chart.
    """

    summary: str
    points: Mapping[str, tuple[tuple[float, float, str], ...]]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    limit: tuple[float, str] | None = None


def choose_step(span: float, most: int) -> float:
    """The distance of round ticks, 1, 2 or 5 times a power of ten, of which at most so many fit into a span above 0."""
    power: float = 10.0 ** math.floor(math.log10(span / most))
    return next(step * power for step in (1, 2, 5, 10) if span <= most * step * power * (1 + 1e-9))


def summarize_chart(chart: Chart) -> str:
    """'loss: 0.31 to 2.5, optimizer step 1 to 400': the range of each line, which has its name if there are several."""
    ranges = []
    for name, line in ((name, line) for name, line in chart.lines.items() if line):
        low, high = chart.format_value(min(line.values())), chart.format_value(max(line.values()))
        named = f"{name} " if len(chart.lines) > 1 else ""
        ranges.append(f"{named}{low} to {high}, {chart.x_name} {min(line):,} to {max(line):,}")
    limit = [] if chart.limit is None else [f"limit {chart.format_value(chart.limit)}"]
    return f"{chart.title}: {'; '.join(ranges + limit)}"


def draw_chart(chart: Chart) -> Drawing:
    """Place the lines of a chart, which have two places or more. The ticks are round, those of bytes in their unit."""
    places = sorted({place for points in chart.lines.values() for place in points})
    values = [value for points in chart.lines.values() for value in points.values()]
    lowest, highest = min(0.0, *values), max(0.0, *values, chart.limit or 0.0)
    highest = highest if lowest or highest else 1.0
    of_bytes = chart.format_value is format_bytes
    unit_name, unit = choose_unit(highest) if of_bytes else ("", 1)
    height = choose_step((highest - lowest) / unit, _Y_TICKS) * unit
    rows = range(math.floor(lowest / height + 1e-9), math.ceil(highest / height - 1e-9) + 1)
    scale: Callable[[float], float] = math.log2 if chart.logarithmic else float
    low, high = scale(places[0]), scale(places[-1])

    def x(place: int) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * (scale(place) - low) / (high - low), 1)

    def y(value: float) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * (value / height - rows[0]) / (rows[-1] - rows[0]), 1)

    points = {
        name: tuple(
            (x(place), y(value), f"{name}, {chart.x_name} {place}: {chart.format_value(value)}")
            for place, value in sorted(line.items())
        )
        for name, line in chart.lines.items()
    }

    def name_tick(value: float) -> str:
        return f"{value / unit:.10g} {unit_name}" if of_bytes else chart.format_value(value)

    return Drawing(
        summary=summarize_chart(chart),
        points=points,
        x_ticks=tuple(
            (x(place), f"{place:,}") for place in _choose_x_ticks(places, x, round_ones=not chart.logarithmic)
        ),
        y_ticks=tuple((y(row * height), name_tick(row * height) if row else "0") for row in rows),
        limit=None if chart.limit is None else (y(chart.limit), f"limit {chart.format_value(chart.limit)}"),
    )


def _choose_x_ticks(places: Sequence[int], x: Callable[[int], float], *, round_ones: bool) -> list[int]:
    """Round numbers, or the places of measurements that do not lie too close to the one before."""
    if round_ones:
        most = min(_X_TICKS, int((_RIGHT - _LEFT) / _find_width(places[-1])))
        step = max(1, int(choose_step(places[-1] - places[0], most)))
        return list(range(-(-places[0] // step) * step, places[-1] + 1, step))
    shown = [places[0]]
    for place in places[1:]:
        if x(place) - x(shown[-1]) >= max(_X_APART, _find_width(place)):
            shown.append(place)
    return shown


def _find_width(place: int) -> float:
    return _LETTER * len(f"{place:,}")
