"""The table of `autods probe` on the terminal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..types import TIERS, Scalar, Tier
from ..units import format_bytes
from .results.probe import CellResult, ProbeReport
from .serialize import PROBE_CSV
from .text import MARKS, format_ranks, format_rate, format_seconds, format_value, pairs_grid, plain_table

# Columns that a narrow terminal leaves out, in order.
_DISPENSABLE = ("sent\na step", "host", "pinned", "nvme", "tokens/s", "forecast", "device")


def print_probe(report: ProbeReport, console: Console) -> None:
    """Print the probe; it needs nothing but the value."""
    console.print(Text.assemble("\n", (describe_question(report), "bold")))
    table, left_out = _table(report, console.width)
    console.print(table)
    if left_out:
        file = f"{report.out}/{PROBE_CSV}" if report.out else "--csv FILE"
        line = f"  {', '.join(left_out)}: on a wider terminal, and in {file}\n"
        console.print(Text(line, style="dim"), soft_wrap=True)
    if reasons := list(list_reasons(report)):
        console.print(pairs_grid(reasons))
        console.print()
    for line_text in list_conclusions(report):
        console.print(line_text)
    if report.notes:
        console.print(pairs_grid(("·", Text(note, style="dim")) for note in report.notes))


def describe_question(report: ProbeReport) -> str:
    """'gpt on 2 cpu ranks × 416.0 MiB, bf16, each cell 3 times'."""
    question = report.question
    varies_ranks = len(report.axes.get("gpus", ())) > 1
    ranks = "ranks" if varies_ranks else format_ranks(question.gpus, question.device)
    nodes = f" of {question.nodes} nodes" if (question.nodes) > 1 else ""
    details = [_describe_value(name, values[0]) for name, values in report.axes.items() if len(values) == 1]
    if "precision" not in report.axes:
        details.append(str(question.precision))
    if not question.capacity:
        repeats = question.repeats
        details.append(f"each cell {'once' if repeats == 1 else f'{repeats} times'}")
    memory = format_bytes(question.device_bytes)
    return f"{question.workload} on {ranks}{nodes} × {memory}, {', '.join(details)}"


def _describe_value(name: str, value: Scalar | None) -> str:
    """'zero1', 'micro_batch 4'."""
    return str(value) if name == "rung" else f"{name} {format_value(value)}"


def _table(report: ProbeReport, width: int) -> tuple[Table, list[str]]:
    """The table as far as it fits the terminal, and the names of the columns that were left out."""
    columns = list_columns(report)
    left_out = []
    for name in _DISPENSABLE:
        if _table_width(report, columns) <= width:
            break
        left_out += [column.name.replace("\n", " ") for column in columns if column.name == name]
        columns = [column for column in columns if column.name != name]
    table = plain_table(padding=(0, 0, 0, 1))
    for column in columns:
        table.add_column(column.name, justify="right" if column.right else "left", overflow="fold")
    for cell in report.cells:
        style = "dim" if cell.same_as is not None or cell.status == "refused" else ""
        table.add_row(*(column.cell(cell) for column in columns), style=style)
    return table, left_out


def _table_width(report: ProbeReport, columns: list[Column]) -> int:
    """The widest text of each column, with two spaces before it."""
    texts = [[*column.name.split("\n"), *(str(column.cell(cell)) for cell in report.cells)] for column in columns]
    return sum(max(map(len, column_texts)) + 2 for column_texts in texts)


@dataclass(frozen=True, slots=True)
class Column:
    """A heading, and the text that each cell has under it."""

    name: str
    cell: Callable[[CellResult], str | Text]
    right: bool = True


def list_columns(report: ProbeReport) -> list[Column]:
    """The columns in which some cell has a value, the cell's number first."""
    # The axes that vary; the others stand in the headline. Where none varies, the rung has a column.
    varied = [name for name, values in report.axes.items() if len(values) > 1]
    axes = varied or [name for name in report.axes if name == "rung"]
    columns = [Column("", lambda cell: str(cell.number))]
    columns += [Column(_heading(name), partial(_axis_value, name), right=False) for name in axes]
    columns.append(Column("", _outcome, right=False))
    if report.question.capacity:
        columns.append(Column("forecast", lambda cell: _number(cell.capacity.forecast if cell.capacity else None)))
        columns.append(Column("largest\nmicro batch", _largest))
    reference = report.compared[0] if report.compared is not None else None
    columns += [
        Column("samples/s", lambda cell: _rate(cell.samples_per_second, cell.spread)),
        Column("tokens/s", lambda cell: _rate(cell.tokens_per_second, None)),
        Column(f"× cell {reference or 1}", partial(_ratio, reference)),
        *(Column(tier, partial(_memory, tier)) for tier in TIERS),
        Column("sent\na step", lambda cell: format_bytes(cell.sent_bytes) if cell.sent_bytes else ""),
    ]
    return [column for column in columns if any(str(column.cell(cell)) for cell in report.cells)]


def _heading(name: str) -> str:
    """'NCCL_P2P_DISABLE', 'reduce_\nbucket_size': the last part of a name, in two lines where it is long."""
    short = name.rpartition(".")[2]
    middle = short.find("_", len(short) // 2)
    return f"{short[: middle + 1]}\n{short[middle + 1 :]}" if len(short) > 12 and middle > 0 else short


def _axis_value(name: str, cell: CellResult) -> str:
    text = format_value(cell.values.get(name))
    return f"({text})" if name in cell.unheeded else text


def _outcome(cell: CellResult) -> Text:
    mark, _, style = MARKS[cell.status]
    if cell.same_as is not None:
        return Text(f"= {cell.same_as}", style="dim")
    if cell.status != "out_of_memory" or cell.tier is None:
        return Text(mark, style=style)
    missing = "full" if cell.missing_bytes is None else f"lacks ≥ {format_bytes(cell.missing_bytes)}"
    return Text(f"{mark} {cell.tier} {missing}", style=style)


def _largest(cell: CellResult) -> str:
    capacity = cell.capacity
    if capacity is None or capacity.verified is None:
        return ""
    bound = "" if capacity.exact else " ±" if capacity.refused else " or more"
    return f"{capacity.verified:,}{bound}"


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _rate(rate: float | None, spread: float | None) -> str:
    if rate is None:
        return ""
    return format_rate(rate) + (f" ±{spread:.{0 if spread > 0.1 else 1}%}" if spread is not None else "")


def _memory(tier: Tier, cell: CellResult) -> str:
    use = cell.memory.get(tier)
    return format_bytes(use.peak_bytes) if use is not None and use.peak_bytes else ""


def _ratio(reference: int | None, cell: CellResult) -> Text:
    """'1.32', or '≈ 1.01' where that is within the noise."""
    if cell.number == reference:
        return Text("1", style="dim")
    if cell.ratio is None:
        return Text()
    if cell.ratio.differs:
        return Text(f"{cell.ratio.times:.2f}", style="green" if cell.ratio.times > 1 else "yellow")
    return Text(f"≈ {cell.ratio.times:.2f}", style="dim")


def list_reasons(report: ProbeReport) -> Iterator[tuple[str, Text]]:
    """Sentences by cells: why they did not run, how their capacity was found, or which values have no effect."""
    cells_by_reason: dict[str, list[int]] = {}
    for cell in report.cells:
        if cell.same_as is None:
            for reason in filter(None, (cell.reason, cell.capacity.explanation if cell.capacity else "")):
                cells_by_reason.setdefault(reason, []).append(cell.number)
        for name, why in cell.unheeded.items():
            reason = f"{name} has no effect under {cell.values.get('rung')}: {why}"
            cells_by_reason.setdefault(reason, []).append(cell.number)
    for reason, numbers in cells_by_reason.items():
        yield f"cell{'s' if len(numbers) > 1 else ''} {_number_ranges(numbers)}", Text(reason)


def _number_ranges(numbers: Iterable[int]) -> str:
    """'1-3, 7'."""
    by_offset = itertools.groupby(enumerate(sorted(set(numbers))), key=lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in by_offset]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def list_conclusions(report: ProbeReport) -> Iterator[Text]:
    """The answer of a probe first, then what its marks mean."""
    spent = f"  ({len(report.trials)} trials, {format_seconds(report.seconds)})"
    if report.status == "nothing_fits":
        yield Text.assemble(("no cell fits", "bold red"), (spent, "dim"))
        return
    fitting = [cell for cell in report.cells if cell.status == "fit" and cell.same_as is None]
    if report.question.capacity:
        best = max(fitting, key=lambda cell: cell.micro_batch or 0)
        source = "by the forecast" if report.question.forecast_only else "by trials"
        head = f"largest micro batch: {best.micro_batch:,} with {_distinction(report, best)}, {source}"
        yield Text.assemble((head, "bold green"), (spent, "dim"))
        return
    assert report.compared is not None
    reference, measure = report.compared
    best = max(fitting, key=lambda cell: _speed(cell, measure))
    rate = f"{format_rate(_speed(best, measure))} {measure}/s"
    head = f"fastest: cell {best.number}, {_distinction(report, best)}: {rate}"
    within_noise = best.ratio is not None and not best.ratio.differs
    unsure = f", within the noise of cell {reference}" if within_noise else ""
    yield Text.assemble((head, "bold green"), unsure, (spent, "dim"))
    if any(cell.ratio is not None and not cell.ratio.differs for cell in report.cells):
        yield Text(f"≈: not told apart from cell {reference} by these measurements (95 %)", style="dim")


def _speed(cell: CellResult, measure: str) -> float:
    return (cell.tokens_per_second if measure == "tokens" else cell.samples_per_second) or 0.0


def _distinction(report: ProbeReport, cell: CellResult) -> str:
    """'zero1, micro_batch 4': the values that distinguish the cell."""
    varied = (name for name, values in report.axes.items() if len(values) > 1 or name == "rung")
    return ", ".join(_describe_value(name, cell.values[name]) for name in varied if name not in cell.unheeded)
