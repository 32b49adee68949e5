"""Documents as pages: one HTML file each, which makes no request.

Jinja escapes all text: logs and errors are the user's. The template `page.html` beside this module shows each part.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from .charts import draw_chart, draw_stack, place_on_bar
from .document import MEMORY_KINDS, Document, Headline, Medium, Part, Piece, Words, list_pieces, list_spans
from .serialize import write_whole

PAGE, RUN_PAGE = "report.html", "run.html"
_CLASSES = {"green": "good", "yellow": "fair", "red": "bad", "dim": "dim", "bold": "strong"}  # by style of a line


def write_page(document: Document, path: Path) -> Path:
    """Write the page to a file; return its path. Raises the error of `errors.make_write_error`."""
    write_whole(path, to_page(document))
    return path


def to_page(document: Document) -> str:
    """The document as a page. Its first headline comes first."""
    parts = [part for part in document.parts if Medium.PAGE in part.on]
    headline = next((part for part in parts if isinstance(part, Headline)), None)
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


def _name_kind(value: Part | Piece) -> str:
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
