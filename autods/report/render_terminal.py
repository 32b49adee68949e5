"""Documents on a terminal, by rich."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.containers import Lines
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from ..units import escape_controls
from . import document as doc
from .document import BOUND, Cell, Column, Medium, Words, list_pieces, list_spans

_BAR_CELLS = 20
_AT_LIMIT, _BEYOND_LIMIT = "│", "▶"
_WIDEST = 10_000  # columns
_BOUND_SPACE = "\ue000"  # stands for a space at which no line breaks, while lines are made


class _Sentence(Text):
    """Text that wraps between words, and never between a number and its unit."""

    def blank_copy(self, plain: str = "") -> _Sentence:
        return _Sentence(plain, style=self.style)

    def wrap(self, *args: Any, **options: Any) -> Lines:
        bound = self.copy()
        bound.plain = BOUND.sub(_BOUND_SPACE, self.plain)
        lines = Text.wrap(bound, *args, **options)
        for each in lines:
            each.plain = each.plain.replace(_BOUND_SPACE, " ")
        return lines


def print_document(document: doc.Document, console: Console, *, verbose: bool = False) -> None:
    """Print the parts that a terminal shows, or a terminal with -v. In a file or a pipe no line ends with spaces."""
    if console.is_terminal:
        _print_parts(document, console, verbose=verbose)
        return
    with console.capture() as captured:  # rich fills wrapped lines up to the width
        _print_parts(document, console, verbose=verbose)
    console.file.write("\n".join(line.rstrip() for line in captured.get().split("\n")))


def _print_parts(document: doc.Document, console: Console, *, verbose: bool) -> None:
    medium = Medium.VERBOSE if verbose else Medium.BRIEF
    if document.question:
        console.print()
        _print_words(make_text(document.question, style="bold"), console)
    at_gap = not document.question
    for part in document.parts:
        if medium in part.on:
            if part.gap and not at_gap:
                console.print()
            at_gap = _print_part(part, console, verbose=verbose)


def _print_part(part: doc.Part, console: Console, *, verbose: bool) -> bool:
    """Print a part; return whether an empty line ends it."""
    match part:
        case doc.Heading():
            console.print(make_text(part.words, style="bold"))
            return True  # what it heads follows at once
        case doc.Headline():
            effort = (f"  ({part.effort})" if part.effort else "", "dim")
            _print_words(_Sentence.assemble(make_text(part.words), effort), console, whole=part.whole)
        case doc.Paragraph(indent=0):
            _print_words(make_text(part.words), console, whole=part.whole)
        case doc.Paragraph(whole=True):
            for row in make_text(part.words).split("\n"):
                _print_words(_Sentence.assemble(" " * part.indent, row), console, whole=True)
        case doc.Paragraph():
            console.print(_indent(make_text(part.words), part.indent, hang=part.hang))
        case doc.Bullets(numbered=True):
            console.print(make_grid((f"{number}.", item) for number, item in enumerate(part.items, 1)))
        case doc.Bullets():
            bullets = (_Sentence.assemble("· ", make_text(item)) for item in part.items)
            console.print(Group(*(_indent(bullet, 2, hang=2) for bullet in bullets)))
        case doc.Pairs(whole=True):
            width = max(len(name) for name, _ in part.items)
            for name, command in part.items:
                console.print(Text.assemble((f"  {name:<{width}}  ", "cyan"), _make_cell(command)), soft_wrap=True)
        case doc.Pairs():
            console.print(make_grid(part.items))
        case doc.Legend():
            kinds = (Text.assemble((kind.sign, kind.style), f" {kind.name}") for kind in doc.MEMORY_KINDS.values())
            console.print(Text("  ").join(kinds))
        case doc.Table():
            return _print_table(part, console, verbose=verbose)
        case _:  # drawings
            pass
    return False


def _indent(words: Text, indent: int, *, hang: int) -> RenderableType:
    """The words in lines that begin at `indent`; those after the first begin by `hang` columns more."""
    if not hang:
        return Padding(words, (0, 0, 0, indent), expand=False)
    grid = RichTable.grid()
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    mark, rest = words.divide([hang])
    grid.add_row(mark, _Sentence.assemble(rest))
    return Padding(grid, (0, 0, 0, indent), expand=False)


def _print_words(words: Text, console: Console, *, whole: bool = False) -> None:
    """Print words in lines, or a `whole` one in one line. Printed alone, rich would take them for plain text."""
    console.print(Group(words), soft_wrap=whole)


def _print_table(table: doc.Table, console: Console, *, verbose: bool) -> bool:
    medium = Medium.VERBOSE if verbose else Medium.BRIEF
    drawn, left = fit_table(table, console, medium)
    if is_whole(drawn, console):
        console.print(drawn)
    else:  # its lines would be cut, and a number that lost digits is another one
        left = [column for column in table.columns if medium in column.on and column.below]
        _print_rows(table, [column for column in table.columns if medium in column.on and not column.below], console)
    names = [column.name.replace("\n", " ") for column in left if not column.below]
    if names and table.also_in:
        hint = Text(f"  {', '.join(names)}: on a wider terminal, and in {table.also_in}\n", style="dim")
        console.print(hint, soft_wrap=True)
    places = [place for place, column in enumerate(table.columns) if column in left and column.below]
    below = []
    for row in table.items:
        texts = [text for place in places if (text := _make_cell(row.cells[place]))]
        if texts and (verbose or not row.quiet):
            below.append((str(_make_cell(row.cells[0])), _Sentence("  ").join(texts)))
    if below:
        console.print(make_grid(below))
        console.print()
    return True


def _print_rows(table: doc.Table, columns: Sequence[Column[object]], console: Console) -> None:
    """Print each row by itself: its first cell, and below that the others by the names of their columns."""
    first, *others = ((column.name.replace("\n", " "), table.columns.index(column)) for column in columns)
    console.print()
    for row in table.items:
        console.print(Group(_make_cell(row.cells[first[1]])), style=row.style or None)
        console.print(make_grid((name, cell) for name, place in others if (cell := _make_cell(row.cells[place]))))
    console.print()


def is_whole(drawn: RichTable, console: Console) -> bool:
    """Whether the terminal has the columns that a table takes, so that no line of it is cut."""
    return _measure_width(drawn, console) <= console.width


def _measure_width(drawn: RichTable, console: Console) -> int:
    return Measurement.get(console, console.options.update(max_width=_WIDEST), drawn).minimum


def fit_table(table: doc.Table, console: Console, medium: Medium) -> tuple[RichTable, list[Column[object]]]:
    """The table as far as it fits the terminal, and the columns that left it. A very narrow one cuts it: `is_whole`."""
    shown = [column for column in table.columns if medium in column.on]
    left: list[Column[object]] = []
    while True:
        drawn = _draw_table(table, shown, console)
        spare = max((column for column in shown if column.spare), key=lambda column: column.spare, default=None)
        if is_whole(drawn, console):
            return drawn, left
        if spare is None:
            return _draw_table(table, shown, console, wrap=True), left
        shown.remove(spare)
        left.append(spare)


def _draw_table(
    table: doc.Table, columns: Sequence[Column[object]], console: Console, *, wrap: bool = False
) -> RichTable:
    """Draw these columns of the table. With `wrap` any cell may be broken but those of the first column.

    No column is narrower than its longest word, so the table may be wider than the console: `is_whole`.
    """
    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    places = [table.columns.index(column) for column in columns]
    rows = [[_make_cell(row.cells[place]) for place in places] for row in table.items]
    most = []  # columns that the longest line of each column takes
    for number, column in enumerate(columns):
        breaks = column.wraps or (wrap and number > 0)
        texts = [column.name, *(row[number].plain for row in rows)]
        lines = [line for text in texts for line in text.split("\n")]
        words = [word for line in lines for word in BOUND.sub(_BOUND_SPACE, line).split()] if breaks else lines
        least = max(map(cell_len, words), default=1)
        drawn.add_column(
            Text(column.name),  # no markup: an axis of a probe may have brackets
            justify="right" if column.right else "left",
            no_wrap=not breaks,
            width=max(least, column.least_width) if column.wraps and not wrap else least,
            overflow="fold",
        )
        most.append(max(map(cell_len, lines), default=1))
    for row, cells in zip(table.items, rows, strict=True):
        drawn.add_row(*cells, style=row.style)
    _widen_columns(drawn, most, console)
    return drawn


def _widen_columns(drawn: RichTable, most: Sequence[int], console: Console) -> None:
    """Give the columns what the console has left, the narrowest first, up to the longest line of each.

    Rich would shrink the widest ones instead, without regard to their least width, and cut what it widens again.
    """
    for _ in range(console.width - _measure_width(drawn, console)):
        shorter = [column for column, line in zip(drawn.columns, most, strict=True) if (column.width or 0) < line]
        if not shorter:
            return
        narrowest = min(shorter, key=lambda column: column.width or 0)
        narrowest.width = (narrowest.width or 0) + 1


def _make_cell(cell: Cell) -> Text:
    return _Sentence("\n").join(map(_make_piece, list_pieces(cell)))


def _make_piece(piece: doc.Piece) -> Text:
    if isinstance(piece, doc.MemoryStack):
        return draw_bar(piece)
    return make_text(piece.words if isinstance(piece, doc.Gauge) else piece)


def draw_bar(stack: doc.MemoryStack) -> Text:
    """The device memory by kind. A full bar is the card, and an arrow marks what lies beyond."""
    bar, end = Text(), 0.0
    for kind, size in stack.sizes.items():
        end += size * _BAR_CELLS / stack.limit_bytes
        bar.append(
            doc.MEMORY_KINDS[kind].sign * (min(round(end), _BAR_CELLS) - len(bar)), style=doc.MEMORY_KINDS[kind].style
        )
    bar.append(" " * (_BAR_CELLS - len(bar)))
    is_beyond = stack.forecast.memory["device"].peak_bytes > stack.limit_bytes
    return bar.append(_BEYOND_LIMIT if is_beyond else _AT_LIMIT, style="red" if is_beyond else "dim")


def make_text(words: Words, *, style: str = "") -> Text:
    """The words as rich has them; what has no style gets `style`."""
    return _Sentence.assemble(*((escape_controls(text), span_style or style) for text, span_style in list_spans(words)))


def make_grid(pairs: Iterable[tuple[str, Cell | Text]]) -> RenderableType:
    """Names and what belongs to them in two columns; long text wraps in its own column."""
    grid = RichTable.grid(padding=(0, 2))
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(Text(name), value if isinstance(value, Text) else _make_cell(value))
    return Padding(grid, (0, 0, 0, 2))
