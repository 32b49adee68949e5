"""What a command shows, made once from its result. The renderers turn it into a terminal's text, Markdown or a page.

A row of the answer is one `Column`: its name, and how its cell is read from a value. All renderers show it.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from ..forecast.values import RungForecast


class Medium(enum.Flag):
    """Where a part or a column is shown; a terminal is BRIEF, or VERBOSE with -v."""

    BRIEF = enum.auto()
    VERBOSE = enum.auto()
    MARKDOWN = enum.auto()
    PAGE = enum.auto()
    TERMINAL = BRIEF | VERBOSE
    DETAILS = VERBOSE | PAGE
    EVERYWHERE = TERMINAL | MARKDOWN | PAGE


# Text.

# The space between a number, or its interval in brackets, and its unit, at which no line breaks.
BOUND = re.compile(r"(?<=[\d)]) (?=(?:[KMGT]i?)?B\b|(?:ms|s|min|h|samples/s|tokens/s)\b|%)")


@dataclass(frozen=True, slots=True)
class StyledLine:
    """Words in a row, each with its style: none, or some of bold, dim, green, yellow, red and cyan."""

    pieces: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "".join(words for words, _ in self.pieces)


Words = str | StyledLine


def list_spans(words: Words) -> tuple[tuple[str, str], ...]:
    """The pieces of a line with their styles."""
    return words.pieces if isinstance(words, StyledLine) else ((words, ""),)


def line(*pieces: Words | tuple[str, str]) -> StyledLine:
    """Make a line of plain words, of (words, style) pairs and of other lines."""
    spans: list[tuple[str, str]] = []
    for piece in pieces:
        spans += [piece] if isinstance(piece, tuple) else list_spans(piece)
    return StyledLine(tuple(spans))


# What a cell holds besides text.


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """A size beside its limit. `words` name both; `share` is the one divided by the other, None without a limit."""

    words: Words
    share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStack:
    """The forecast of a rung's device memory by kind of tensor, and the peak that a trial measured.

    `limit_bytes` is that of the trial; without one it is the forecast's, and without that the peak.
    """

    forecast: RungForecast
    measured_bytes: int | None = None
    trial_limit_bytes: int | None = None

    @property
    def limit_bytes(self) -> int:
        device = self.forecast.memory["device"]
        return self.trial_limit_bytes or device.limit_bytes or device.peak_bytes or 1

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes by kind, in the order of `MEMORY_KINDS`; `outside` is what no tensor explains."""
        known = {kind: self.forecast.breakdown.get(kind, 0) for kind in MEMORY_KINDS if kind != "outside"}
        return {**known, "outside": max(0, self.forecast.memory["device"].peak_bytes - sum(known.values()))}


class MemoryKind(NamedTuple):
    """A kind of device memory as people read it; its sign and colour in a bar of a terminal."""

    name: str
    sign: str
    style: str


MEMORY_KINDS: Mapping[str, MemoryKind] = {
    "parameters": MemoryKind("weights", "█", "blue"),
    "gradients": MemoryKind("gradients", "▓", "magenta"),
    "optimizer": MemoryKind("optimizer states", "▒", "cyan"),
    "activations": MemoryKind("activations", "░", "green"),
    "buckets": MemoryKind("buffers", "▪", "yellow"),
    "other": MemoryKind("other tensors", ":", "white"),
    "outside": MemoryKind("outside of tensors", "·", "white"),
}

Piece = Words | Gauge | MemoryStack
Cell = Words | tuple[Piece, ...]  # each piece of a tuple has a line of its own
Value = TypeVar("Value")


def list_pieces(cell: Cell) -> tuple[Piece, ...]:
    return cell if isinstance(cell, tuple) else (cell,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column(Generic[Value]):
    """A column of a table: its name, and how the cell of a value is read.

    `right` aligns numbers. `wraps` allows to break a cell into lines, which are `least_width` letters wide or more.
    On a terminal that is too narrow columns leave the table, that with the highest `spare` first, and those with 0
    never. What leaves with `below` stands below the table, row by row.
    """

    name: str
    read: Callable[[Value], Cell]
    right: bool = False
    wraps: bool = False
    least_width: int = 0
    spare: int = 0
    below: bool = False
    on: Medium = Medium.EVERYWHERE


# Parts.


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a document. `gap` asks a terminal for an empty line before it."""

    on: Medium = Medium.EVERYWHERE
    gap: bool = False

    @property
    def is_empty(self) -> bool:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing(Part):
    """A part that is made of items."""

    items: tuple[Any, ...]

    @property
    def is_empty(self) -> bool:
        return not self.items


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading(Part):
    words: Words
    gap: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline(Part):
    """The answer, and what it took. A page begins with it. A `whole` one stays in one line."""

    words: Words
    effort: str = ""
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Paragraph(Part):
    """A sentence or more. A `whole` one stays in one line, as paths do.

    A terminal indents it by so many columns. Lines after the first `hang`: they begin by so many more, below the words
    that follow a mark.
    """

    words: Words
    whole: bool = False
    indent: int = 0
    hang: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bullets(Listing):
    items: tuple[Words, ...]
    numbered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs(Listing):
    """Names with what belongs to them. `whole` ones are lines to be copied."""

    items: tuple[tuple[str, Cell], ...]
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """The cells of a row. Below the table a `quiet` one is explained only with -v."""

    cells: tuple[Cell, ...]
    style: str = ""
    quiet: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Listing):
    """Rows under columns. `also_in` tells where columns are that a narrow terminal leaves out."""

    columns: tuple[Column[Any], ...]
    items: tuple[TableRow, ...]
    also_in: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Legend(Part):
    """The kinds of memory with their signs or colours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart(Part):
    """Values by their x, on a scale that has 0, by the name of their line; nothing where all have one x.

    x is above 0 if `logarithmic`. The line `dots` has points alone. `limit` is a value that the lines must not exceed.
    """

    title: str
    lines: Mapping[str, Mapping[int, float]]
    format_value: Callable[[float], str]
    x_name: str = "micro batch"
    logarithmic: bool = True
    dots: str | None = None
    limit: float | None = None
    on: Medium = Medium.PAGE

    @property
    def is_empty(self) -> bool:
        return len({place for points in self.lines.values() for place in points}) < 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """Something that opens: its summary, sentences, and the text of a log or a config, which can be copied."""

    summary: Words
    sentences: tuple[str, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Details(Listing):
    items: tuple[Detail, ...]
    on: Medium = Medium.PAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What a command shows. `title` is that of its page; `question` is what was asked. No part is empty."""

    title: str
    question: Words
    parts: tuple[Part, ...]


def tabulate(
    columns: Iterable[Column[Value]],
    values: Iterable[Value],
    *,
    style: Callable[[Value], str] = lambda value: "",
    quiet: Callable[[Value], bool] = lambda value: False,
    also_in: str = "",
) -> Table:
    """Make the table of some values, without the columns that have no value in any row."""
    columns, values = tuple(columns), tuple(values)
    cells = [[column.read(value) for column in columns] for value in values]

    def is_used(place: int) -> bool:
        return any(str(piece) not in ("", "–") for row in cells for piece in list_pieces(row[place]))

    used = [place for place in range(len(columns)) if is_used(place)]
    rows = (
        TableRow(cells=tuple(row[place] for place in used), style=style(value), quiet=quiet(value))
        for value, row in zip(values, cells, strict=True)
    )
    return Table(columns=tuple(columns[place] for place in used), items=tuple(rows), also_in=also_in)


def make_document(title: str, question: Words, parts: Iterable[Part]) -> Document:
    """Make the document of the parts that are not empty."""
    return Document(title=title, question=question, parts=tuple(part for part in parts if not part.is_empty))


def titled(title: Words, part: Part) -> tuple[Part, ...]:
    """The part under a heading; nothing for an empty one."""
    return () if part.is_empty else (Heading(words=title, on=part.on), part)
