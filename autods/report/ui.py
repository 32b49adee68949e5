"""What the terminal views share: marks, words for memory tiers, widths and layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..types import Tier

# Terminal columns from which a view shows more.
WIDE_PROGRESS = 110
WIDE_FIT = 116  # the reasons stand in the table instead of under it
PLAN_WITH_BARS, PLAN_WITH_PHASES, PLAN_WITH_REASONS = 110, 122, 150
WIDEST_LIVE_TABLE = 130
BAR_CELLS = 20


class Mark(NamedTuple):
    """A sign, its meaning in words, and its rich style."""

    sign: str
    word: str
    style: str

    def text(self) -> Text:
        """'✓ fits', coloured."""
        return Text(f"{self.sign} {self.word}", style=self.style)


# By the kind of an outcome, the verdict of a forecast or the status of a probe's cell.
MARKS: Mapping[str, Mark] = {
    "fit": Mark("✓", "fits", "green"),
    "fits": Mark("✓", "fits", "green"),
    "tight": Mark("~", "tight", "yellow"),
    "out_of_memory": Mark("✗", "out of memory", "yellow"),
    "cannot_fit": Mark("✗", "cannot fit", "red"),
    "failed": Mark("!", "failed", "red"),
    "skipped": Mark("–", "skipped", "dim"),
    "refused": Mark("–", "refused", "dim"),
    "not_applicable": Mark("–", "not applicable", "dim"),
}
TIER_NAMES: Mapping[Tier, str] = {
    "device": "device memory",
    "host": "host memory",
    "pinned": "pinned memory",
    "shm": "shared memory (/dev/shm)",
    "nvme": "disk space (NVMe)",
}


def plain_table(*, expand: bool = False, padding: tuple[int, ...] = (0, 1)) -> Table:
    """A table with a rule under its head and no borders."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=padding, expand=expand)  # type: ignore[arg-type]


def pairs_grid(pairs: Iterable[tuple[str, RenderableType]]) -> RenderableType:
    """Names and their values in two columns; long text wraps in its own column."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(name, value)
    return Padding(table, (0, 0, 0, 2))


def bullets(lines: Iterable[str], *, style: str = "") -> RenderableType:
    """One indented line each, with a dot before it."""
    return Group(*(Padding(Text(f"· {line}", style=style), (0, 0, 0, 2)) for line in lines))
