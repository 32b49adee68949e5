"""Shapes that more than one page on the terminal has."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table


def pairs_grid(pairs: Iterable[tuple[str, RenderableType]]) -> RenderableType:
    """Names and what is said of them; long text wraps in its own column."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, said in pairs:
        table.add_row(name, said)
    return Padding(table, (0, 0, 0, 2))
