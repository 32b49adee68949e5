"""The columns of a probe's table: what varies, then what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.text import Text

from ..outcomes import TIERS, Tier
from ..units import show_bytes
from ..values import Scalar
from . import words
from .probe_result import CellResult, ProbeReport, Ratio

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
    said = of_value(cell.values.get(name))
    return Text(f"({said})" if name in cell.unheeded else said)


def of_value(value: Scalar | None) -> str:
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
    yield Column("sent\na step", lambda cell: show_bytes(cell.sent_bytes) if cell.sent_bytes else "")


def _outcome(cell: CellResult) -> Text:
    mark, style = _MARKS[cell.status]
    if cell.same_as is not None:
        return Text(f"= {cell.same_as}", style="dim")
    if cell.status == "out_of_memory" and cell.tier is not None:
        missing = f" ≥ {show_bytes(cell.missing_bytes)}" if cell.missing_bytes is not None else ""
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
    return words.of_rate(rate) + (f" ±{spread:.{0 if spread > 0.1 else 1}%}" if spread is not None else "")


def _times(report: ProbeReport) -> Callable[[CellResult], Text]:
    reference = _reference(report)

    def cell_text(cell: CellResult) -> Text:
        if cell.number == reference:
            return Text("1", style="dim")
        return of_ratio(cell.ratio) if cell.ratio is not None else Text()

    return cell_text


def of_ratio(ratio: Ratio) -> Text:
    """'1.32', or '≈ 1.01' where that is within the noise."""
    if ratio.differs:
        return Text(f"{ratio.times:.2f}", style="green" if ratio.times > 1 else "yellow")
    return Text(f"≈ {ratio.times:.2f}", style="dim")


def _memory(tier: Tier) -> Callable[[CellResult], str]:
    def text(cell: CellResult) -> str:
        use = cell.memory.get(tier)
        if use is None or not use.peak_bytes:
            return ""
        return show_bytes(use.peak_bytes)

    return text


def _reference(report: ProbeReport) -> int | None:
    return report.compared[0] if report.compared is not None else None
