"""Documents as Markdown, for a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ..units import escape_controls
from . import document as doc
from .document import Cell, Medium, Words, list_pieces

# What Markdown reads as its own: code, emphasis, links, columns, strikes. An underscore within a word is a letter.
_MARKS = re.compile(r"[\\`*\[\]|~]|(?<![^\W_])_|_(?![^\W_])")


def to_markdown(document: doc.Document) -> str:
    """The parts that Markdown shows, with an empty line between them."""
    blocks = ([escape(document.question)] if document.question else []) + [
        "\n".join(_list_lines(part)) for part in document.parts if Medium.MARKDOWN in part.on
    ]
    return "\n\n".join(block for block in blocks if block)


def escape(words: Words) -> str:
    """Text in one line, in which what Markdown or HTML would read as its own is escaped."""
    text = _MARKS.sub(r"\\\g<0>", escape_controls(str(words)))
    for mark, instead in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(mark, instead)
    return " ".join(text.split())


def _list_lines(part: doc.Part) -> Iterator[str]:
    match part:
        case doc.Heading():
            yield f"**{escape(part.words)}**"
        case doc.Headline():
            yield f"**{escape(part.words)}**" + (f" ({escape(part.effort)})" if part.effort else "")
        case doc.Paragraph():
            yield escape(part.words)
        case doc.Bullets():
            yield from (f"{'1.' if part.numbered else '-'} {escape(item)}" for item in part.items)
        case doc.Pairs():
            yield from (f"- {escape(name)}: {_format_cell(cell)}" for name, cell in part.items)
        case doc.Table():
            places = [place for place, column in enumerate(part.columns) if Medium.MARKDOWN in column.on]
            yield _format_row(escape(part.columns[place].name) for place in places)
            yield "|" + "".join("---:|" if part.columns[place].right else "---|" for place in places)
            for row in part.items:
                yield _format_row(_format_cell(row.cells[place]) for place in places)
        case _:  # drawings
            pass


def _format_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _format_cell(cell: Cell) -> str:
    texts = (piece.words if isinstance(piece, doc.Gauge) else piece for piece in list_pieces(cell))
    return ", ".join(escape(text) for text in texts if isinstance(text, str | doc.StyledLine) and str(text))
