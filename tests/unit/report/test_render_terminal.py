"""Tables on terminals of any width: every word can be read."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

from rich.console import Console

from autods.report import document as doc
from autods.report.document import Column, Medium, tabulate
from autods.report.render_terminal import fit_table, is_whole
from tests.support.terminal import printed

WORDS = ("zero3", "micro", "×", "of", "accumulation", "rank", "out_of_memory:", "instead", "infrastructure)", "12,000")
SIZES = ("1.0 GiB", "124.5 MiB", "8.71 samples/s", "3 %")
NAMES = ("config", "steps", "again", "time", "end", "then", "largest\nmicro batch", "rank 0")


def generate_tables(number: int) -> Iterator[doc.Table]:
    """Tables of 2 to 8 columns and 1 to 4 rows; the first cell of a row is one short word."""
    draw = random.Random(0)
    for _ in range(number):
        columns, cells = [make_column(0, "")], [[draw.choice(("1", "zero3", "ddp"))] for _ in range(draw.randint(1, 4))]
        for place, name in enumerate(draw.sample(NAMES, draw.randint(1, 7)), 1):
            for row in cells:
                row.append(" ".join(draw.choices(WORDS + SIZES, k=draw.choice((1, 2, 12)))))
            leaves, wraps = draw.random() < 0.2, draw.random() < 0.4
            least_width = draw.choice((0, 24)) if wraps else 0
            columns.append(
                make_column(
                    place,
                    name,
                    wraps=wraps,
                    least_width=least_width,
                    right=draw.random() < 0.3,
                    spare=leaves,
                    below=leaves,
                )
            )
        yield tabulate(columns, cells)


def make_column(place: int, name: str, **options: Any) -> Column[Sequence[str]]:
    return Column(name=name, read=itemgetter(place), **options)


def count_words(text: str) -> Counter[str]:
    return Counter(text.split())


def test_every_word_of_a_table_can_be_read_at_any_width() -> None:
    for table, width in zip(generate_tables(200), itertools.cycle(range(40, 131)), strict=False):
        cells = [str(cell) for row in table.items for cell in row.cells]
        text = printed(doc.Document(title="", question="", parts=(table,)), width)
        assert max(map(len, text.split("\n"))) <= width
        assert not count_words(" ".join(cells)) - count_words(text), text
        for size in SIZES:  # a number stays with its unit
            assert text.count(size) >= sum(cell.count(size) for cell in cells), text


def test_a_table_is_whole_if_the_terminal_has_its_columns() -> None:
    for table, width in zip(generate_tables(100), itertools.cycle(range(40, 131)), strict=False):
        console = Console(width=width)
        drawn, _ = fit_table(table, console, Medium.BRIEF)
        header, *_ = console.render_lines(drawn, console.options.update(max_width=10_000), pad=False)
        assert is_whole(drawn, console) == (sum(segment.cell_length for segment in header) <= width)


def test_columns_that_wrap_share_what_the_terminal_has_left() -> None:
    cells = ("a b c d e f g h i j k l m n", "a b c d e f", "abcdefghijklmnopqrstuvwxyz")
    columns = [make_column(place, str(place), wraps=True) for place in range(len(cells))]
    drawn, _ = fit_table(tabulate(columns, [cells]), Console(width=60), Medium.BRIEF)
    assert [column.width for column in drawn.columns] == [17, 11, 26]
