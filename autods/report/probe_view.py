"""The table of `autods probe` on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..types import TIERS, Scalar, Tier
from ..units import format_bytes
from .results import PROBE_CSV, CellResult, ProbeReport, Ratio
from .text import format_ranks, format_rate, format_seconds, pairs_grid

_MARKS = {"fit": ("✓", "green"), "out_of_memory": ("✗", "yellow"), "failed": ("!", "red"), "refused": ("–", "dim")}


@dataclass(frozen=True, slots=True)
class Column:
    """A heading and what stands under it; a column in which nothing stands is left out."""

    name: str
    cell: Callable[[CellResult], str | Text]
    right: bool = True


def columns_of(report: ProbeReport) -> list[Column]:
    """All that have something to say, the cell's number first."""
    columns = [Column("", lambda cell: str(cell.number)), *_axes(report), *_measures(report)]
    return [column for column in columns if any(str(column.cell(cell)) for cell in report.cells)]


def _axes(report: ProbeReport) -> Iterator[Column]:
    """Those that vary; what is the same in all cells stands in the headline, but where nothing varies at all."""
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
    said = format_value(cell.values.get(name))
    return Text(f"({said})" if name in cell.unheeded else said)


def format_value(value: Scalar | None) -> str:
    """As it was given: 'on', '1,000,000', 'not set'."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)


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
    mark, style = _MARKS[cell.status]
    if cell.same_as is not None:
        return Text(f"= {cell.same_as}", style="dim")
    if cell.status == "out_of_memory" and cell.tier is not None:
        missing = f" ≥ {format_bytes(cell.missing_bytes)}" if cell.missing_bytes is not None else ""
        return Text(f"{mark} {cell.tier} lacks{missing}" if missing else f"{mark} {cell.tier} full", style=style)
    return Text(mark, style=style)


def _largest(cell: CellResult) -> str:
    if cell.capacity is None or cell.capacity.verified is None:
        return ""
    return f"{cell.capacity.verified:,}" + (
        "" if cell.capacity.exact else " or more" if not cell.capacity.refused else " ±"
    )


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
        return format_ratio(cell.ratio) if cell.ratio is not None else Text()

    return cell_text


def format_ratio(ratio: Ratio) -> Text:
    """'1.32', or '≈ 1.01' where that is within the noise."""
    if ratio.differs:
        return Text(f"{ratio.times:.2f}", style="green" if ratio.times > 1 else "yellow")
    return Text(f"≈ {ratio.times:.2f}", style="dim")


def _memory(tier: Tier) -> Callable[[CellResult], str]:
    def text(cell: CellResult) -> str:
        use = cell.memory.get(tier)
        if use is None or not use.peak_bytes:
            return ""
        return format_bytes(use.peak_bytes)

    return text


def _reference(report: ProbeReport) -> int | None:
    return report.compared[0] if report.compared is not None else None


# What a narrow terminal does without, in order.
_LESS = ("sent\na step", "host", "pinned", "nvme", "tokens/s", "forecast", "device")


def print_probe(report: ProbeReport, console: Console) -> None:
    """Print the probe; reads nothing but the value."""
    console.print(Text.assemble("\n", (_question(report), "bold")))
    table, left_out = _table(report, console.width)
    console.print(table)
    if left_out:
        where = f"{report.out}/{PROBE_CSV}" if report.out else "--csv FILE"
        console.print(
            Text(f"  {', '.join(left_out)}: on a wider terminal, and in {where}\n", style="dim"), soft_wrap=True
        )
    if lines := list(_reasons(report)):
        console.print(pairs_grid(lines))
        console.print()
    for line in _sentences(report):
        console.print(line)
    if report.notes:
        console.print(pairs_grid(("·", Text(note, style="dim")) for note in report.notes))


def _table(report: ProbeReport, width: int) -> tuple[Table, list[str]]:
    """The table as far as the terminal is wide, and the columns that had to be left out."""
    shown = columns_of(report)
    left_out = []
    for name in _LESS:
        if _width(report, shown) <= width:
            break
        left_out += [column.name.replace("\n", " ") for column in shown if column.name == name]
        shown = [column for column in shown if column.name != name]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    for column in shown:
        table.add_column(column.name, justify="right" if column.right else "left", overflow="fold")
    for cell in report.cells:
        style = "dim" if cell.same_as is not None or cell.status == "refused" else ""
        table.add_row(*(column.cell(cell) for column in shown), style=style)
    return table, left_out


def _width(report: ProbeReport, columns: list[Column]) -> int:
    """Of the table: its widest cells, and two spaces before each."""
    texts = [[*column.name.split("\n"), *(str(column.cell(cell)) for cell in report.cells)] for column in columns]
    return sum(max(map(len, one)) + 2 for one in texts)


def _reasons(report: ProbeReport) -> Iterator[tuple[str, Text]]:
    """What does not stand in the table: why a cell did not run, what a capacity rests on, which values mean nothing."""
    said: dict[str, list[int]] = {}
    for cell in report.cells:
        if cell.same_as is None:
            for reason in filter(None, (cell.reason, cell.capacity.said if cell.capacity else "")):
                said.setdefault(reason, []).append(cell.number)
        for name, why in cell.unheeded.items():
            said.setdefault(f"{name} means nothing under {cell.values.get('rung')}: {why}", []).append(cell.number)
    for reason, numbers in said.items():
        yield f"cell{'s' if len(numbers) > 1 else ''} {_numbers(numbers)}", Text(reason)


def _numbers(numbers: Iterable[int]) -> str:
    """'1-3, 7'."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _sentences(report: ProbeReport) -> Iterator[Text]:
    spent = f"  ({len(report.trials)} trials, {format_seconds(report.seconds)})"
    if report.status == "nothing_fits":
        yield Text.assemble(("no cell fits", "bold red"), (spent, "dim"))
        return
    fitting = [cell for cell in report.cells if cell.status == "fit" and cell.same_as is None]
    if report.question.get("capacity"):
        best = max(fitting, key=lambda cell: cell.micro_batch or 0)
        how = "by the forecast" if report.question.get("forecast_only") else "by trials"
        head = f"largest micro batch: {best.micro_batch:,} with {_named(report, best)}, {how}"
        yield Text.assemble((head, "bold green"), (spent, "dim"))
        return
    assert report.compared is not None
    by = report.compared[1]
    best = max(fitting, key=lambda cell: (cell.tokens_per_second if by == "tokens" else cell.samples_per_second) or 0)
    rate = best.tokens_per_second if by == "tokens" else best.samples_per_second
    head = f"fastest: cell {best.number}, {_named(report, best)}: {format_rate(rate or 0)} {by}/s"
    within = best.ratio is not None and not best.ratio.differs
    unsure = f", within the noise of cell {report.compared[0]}" if within else ""
    yield Text.assemble((head, "bold green"), unsure, (spent, "dim"))
    if any(cell.ratio is not None and not cell.ratio.differs for cell in report.cells):
        yield Text(f"≈: not told apart from cell {report.compared[0]} by these measurements (95 %)", style="dim")


def _named(report: ProbeReport, cell: CellResult) -> str:
    """'zero1, micro_batch 4': what distinguishes the cell."""
    varied = [name for name, values in report.axes.items() if len(values) > 1 or name == "rung"]
    return ", ".join(
        str(cell.values[name]) if name == "rung" else f"{name} {format_value(cell.values[name])}"
        for name in varied
        if name not in cell.unheeded
    )


def _question(report: ProbeReport) -> str:
    """'gpt on 2 cpu ranks × 416.0 MiB, bf16, each cell 3 times'."""
    asked: Mapping[str, object] = report.question
    ranks = (
        format_ranks(int(str(asked["gpus"])), str(asked["device"])) if len(report.axes.get("gpus", ())) < 2 else "ranks"
    )
    if int(str(asked.get("nodes") or 1)) > 1:
        ranks += f" of {asked.get('nodes')} nodes"
    fixed = [
        f"{name} {format_value(values[0])}" if name != "rung" else str(values[0])
        for name, values in report.axes.items()
        if len(values) == 1
    ]
    precision = [] if "precision" in report.axes else [str(asked.get("precision"))]
    often = "once" if asked.get("repeats") == 1 else f"{asked.get('repeats')} times"
    repeats = f"each cell {often}" if not asked.get("capacity") else ""
    said = ", ".join(part for part in (*fixed, *precision, repeats) if part)
    return f"{asked.get('workload')} on {ranks} × {format_bytes(float(str(asked.get('device_bytes') or 0)))}, {said}"
