"""The table of `autods probe` on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..types import TIERS, Tier
from ..units import format_bytes
from .results import PROBE_CSV, CellResult, ProbeReport, Ratio
from .text import MARKS, format_ranks, format_rate, format_seconds, format_value, pairs_grid, plain_table

# Columns that a narrow terminal leaves out, in order.
_DISPENSABLE = ("sent\na step", "host", "pinned", "nvme", "tokens/s", "forecast", "device")


def print_probe(report: ProbeReport, console: Console) -> None:
    """Print the probe; it needs nothing but the value."""
    console.print(Text.assemble("\n", (_question(report), "bold")))
    table, left_out = _table(report, console.width)
    console.print(table)
    if left_out:
        file = f"{report.out}/{PROBE_CSV}" if report.out else "--csv FILE"
        line = f"  {', '.join(left_out)}: on a wider terminal, and in {file}\n"
        console.print(Text(line, style="dim"), soft_wrap=True)
    if reasons := list(_reasons(report)):
        console.print(pairs_grid(reasons))
        console.print()
    for line_text in _conclusions(report):
        console.print(line_text)
    if report.notes:
        console.print(pairs_grid(("·", Text(note, style="dim")) for note in report.notes))


def _question(report: ProbeReport) -> str:
    """'gpt on 2 cpu ranks × 416.0 MiB, bf16, each cell 3 times'."""
    question: Mapping[str, object] = report.question
    ranks = "ranks"
    if len(report.axes.get("gpus", ())) < 2:
        ranks = format_ranks(int(str(question["gpus"])), str(question["device"]))
    if int(str(question.get("nodes") or 1)) > 1:
        ranks += f" of {question.get('nodes')} nodes"
    fixed = [
        f"{name} {format_value(values[0])}" if name != "rung" else str(values[0])
        for name, values in report.axes.items()
        if len(values) == 1
    ]
    precision = [] if "precision" in report.axes else [str(question.get("precision"))]
    times = "once" if question.get("repeats") == 1 else f"{question.get('repeats')} times"
    repeats = f"each cell {times}" if not question.get("capacity") else ""
    details = ", ".join(part for part in (*fixed, *precision, repeats) if part)
    memory = format_bytes(float(str(question.get("device_bytes") or 0)))
    return f"{question.get('workload')} on {ranks} × {memory}, {details}"


def _table(report: ProbeReport, width: int) -> tuple[Table, list[str]]:
    """The table as far as it fits the terminal, and the names of the columns that were left out."""
    columns = _columns(report)
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


def _columns(report: ProbeReport) -> list[Column]:
    """The columns in which some cell has a value, the cell's number first."""
    columns = [Column("", lambda cell: str(cell.number)), *_axes(report), *_measures(report)]
    return [column for column in columns if any(str(column.cell(cell)) for cell in report.cells)]


def _axes(report: ProbeReport) -> Iterator[Column]:
    """The axes that vary; the others stand in the headline. Where none varies, the rung has a column."""
    alone = all(len(values) == 1 for values in report.axes.values())
    for name, values in report.axes.items():
        if len(values) > 1 or (alone and name == "rung"):
            yield Column(_heading(name), lambda cell, name=name: _value(cell, name), right=False)  # type: ignore[misc]


def _heading(name: str) -> str:
    """'NCCL_P2P_DISABLE', 'reduce_\nbucket_size': the last part of a name, in two lines where it is long."""
    short = name.rpartition(".")[2]
    middle = short.find("_", len(short) // 2)
    return f"{short[: middle + 1]}\n{short[middle + 1 :]}" if len(short) > 12 and middle > 0 else short


def _value(cell: CellResult, name: str) -> Text:
    text = format_value(cell.values.get(name))
    return Text(f"({text})" if name in cell.unheeded else text)


def _measures(report: ProbeReport) -> Iterator[Column]:
    yield Column("", _outcome, right=False)
    if report.question.get("capacity"):
        yield Column("forecast", lambda cell: _number(cell.capacity.forecast if cell.capacity else None))
        yield Column("largest\nmicro batch", _largest)
    yield Column("samples/s", lambda cell: _rate(cell.samples_per_second, cell.spread))
    yield Column("tokens/s", lambda cell: _rate(cell.tokens_per_second, None))
    yield Column("× cell 1" if _reference(report) in (None, 1) else f"× cell {_reference(report)}", _times(report))
    for tier in TIERS:
        yield Column(tier, _memory(tier))
    yield Column("sent\na step", lambda cell: format_bytes(cell.sent_bytes) if cell.sent_bytes else "")


def _outcome(cell: CellResult) -> Text:
    mark, _, style = MARKS[cell.status]
    if cell.same_as is not None:
        return Text(f"= {cell.same_as}", style="dim")
    if cell.status == "out_of_memory" and cell.tier is not None:
        missing = f" ≥ {format_bytes(cell.missing_bytes)}" if cell.missing_bytes is not None else ""
        return Text(f"{mark} {cell.tier} lacks{missing}" if missing else f"{mark} {cell.tier} full", style=style)
    return Text(mark, style=style)


def _largest(cell: CellResult) -> str:
    if cell.capacity is None or cell.capacity.verified is None:
        return ""
    if cell.capacity.exact:
        return f"{cell.capacity.verified:,}"
    return f"{cell.capacity.verified:,} {'±' if cell.capacity.refused else 'or more'}"


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _rate(rate: float | None, spread: float | None) -> str:
    if rate is None:
        return ""
    return format_rate(rate) + (f" ±{spread:.{0 if spread > 0.1 else 1}%}" if spread is not None else "")


def _times(report: ProbeReport) -> Callable[[CellResult], Text]:
    reference = _reference(report)

    def cell_text(cell: CellResult) -> Text:
        if cell.number == reference:
            return Text("1", style="dim")
        return _ratio(cell.ratio) if cell.ratio is not None else Text()

    return cell_text


def _ratio(ratio: Ratio) -> Text:
    """'1.32', or '≈ 1.01' where that is within the noise."""
    if ratio.differs:
        return Text(f"{ratio.times:.2f}", style="green" if ratio.times > 1 else "yellow")
    return Text(f"≈ {ratio.times:.2f}", style="dim")


def _memory(tier: Tier) -> Callable[[CellResult], str]:
    def cell_text(cell: CellResult) -> str:
        use = cell.memory.get(tier)
        return format_bytes(use.peak_bytes) if use is not None and use.peak_bytes else ""

    return cell_text


def _reference(report: ProbeReport) -> int | None:
    return report.compared[0] if report.compared is not None else None


def _reasons(report: ProbeReport) -> Iterator[tuple[str, Text]]:
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
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _conclusions(report: ProbeReport) -> Iterator[Text]:
    spent = f"  ({len(report.trials)} trials, {format_seconds(report.seconds)})"
    if report.status == "nothing_fits":
        yield Text.assemble(("no cell fits", "bold red"), (spent, "dim"))
        return
    fitting = [cell for cell in report.cells if cell.status == "fit" and cell.same_as is None]
    if report.question.get("capacity"):
        best = max(fitting, key=lambda cell: cell.micro_batch or 0)
        source = "by the forecast" if report.question.get("forecast_only") else "by trials"
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
    varied = [name for name, values in report.axes.items() if len(values) > 1 or name == "rung"]
    return ", ".join(
        str(cell.values[name]) if name == "rung" else f"{name} {format_value(cell.values[name])}"
        for name in varied
        if name not in cell.unheeded
    )
