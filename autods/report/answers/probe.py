"""The document of `autods probe`: every cell with its measurements, what they mean, and charts over the axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from ...config.catalogue import ASKED, HERE
from ...types import TIERS, Scalar, Tier
from ...units import format_bytes
from .. import document as doc
from ..document import Cell, Column, Medium, Words, line, make_document, tabulate, titled
from ..results.probe import CellResult, ProbeReport, Ratio
from ..serialize import PROBE_CSV
from ..text import MARKS, format_number_of, format_ranks, format_rate, format_seconds, format_value
from ..trial_names import name_conditions
from .trials import describe_machine, list_trials

_MOST_LINES = 8  # of a chart


def make_probe_document(report: ProbeReport, folder: Path | None = None) -> doc.Document:
    """What a probe shows. Its page quotes the logs in `folder`, that of the probe; None leaves them out."""
    return make_document(
        title=report.question.workload,
        question=describe_question(report),
        parts=_list_parts(report, folder),
    )


def _list_parts(report: ProbeReport, folder: Path | None) -> Iterator[doc.Part]:
    yield describe_answer(report)
    for warning in report.warnings:
        yield doc.Paragraph(words=line((f"warning: {warning}", "yellow")), whole=True)
    yield tabulate(
        list_columns(report),
        report.cells,
        style=lambda cell: "dim" if cell.same_as is not None or cell.status == "refused" else "",
        also_in=f"{report.out}/{PROBE_CSV}" if report.out else "--csv FILE",
    )
    if reasons := tuple(list_reasons(report)):
        yield doc.Heading(words="Why", on=Medium.PAGE)
        yield doc.Pairs(items=reasons)
    yield from _explain_marks(report)
    yield doc.Bullets(items=tuple(line((note, "dim")) for note in report.notes))
    yield from list_charts(report)
    yield from titled("Every trial", list_trials(report.trials, folder, partial(name_conditions, report.axes)))
    yield from titled("Machine and versions", describe_machine(report.hardware, report.versions))


def describe_question(report: ProbeReport) -> str:
    """'gpt on 2 cpu ranks × 416.0 MiB, bf16, each cell 3 times'; 'gpt on 1, 2 or 4 cuda ranks × …' where it varies."""
    question = report.question
    *fewer, last = (format_value(count) for count in report.axes.get("gpus", ()) or (question.gpus,))
    ranks = format_ranks(question.gpus, question.device)
    if fewer:
        ranks = f"{', '.join(fewer)} or {last} {question.device} ranks"
    nodes = f" of {question.nodes} nodes" if question.nodes > 1 else ""
    machine = "" if question.machine in (None, ASKED, HERE) else f" ({question.machine})"
    details = [f"{format_bytes(question.device_bytes)}{machine}"]
    details += [_describe_value(name, values[0]) for name, values in report.axes.items() if len(values) == 1]
    if "precision" not in report.axes:
        details.append(str(question.precision))
    if not question.capacity:
        repeats = question.repeats
        details.append(f"each cell {'once' if repeats == 1 else f'{repeats} times'}")
    return f"{question.workload} on {ranks}{nodes} × {', '.join(details)}"


def _describe_value(name: str, value: Scalar | None) -> str:
    """'zero1', 'micro_batch 4'."""
    return str(value) if name == "rung" else f"{name} {format_value(value)}"


def list_columns(report: ProbeReport) -> list[Column[CellResult]]:
    """The columns of a cell, its number first. The axes that do not vary stand in the question."""
    varied = [name for name, values in report.axes.items() if len(values) > 1]
    axes = varied or [name for name in report.axes if name == "rung"]
    reference = report.compared[0] if report.compared is not None else None
    return [
        Column(name="", read=lambda cell: str(cell.number), right=True),
        *(Column(name=name.rpartition(".")[2], read=partial(_format_axis_value, name)) for name in axes),
        Column(name="", read=_describe_outcome),
        Column(name="forecast", read=lambda cell: _format_capacity(cell)[0], right=True, spare=2),
        Column(name="largest\nmicro batch", read=lambda cell: _format_capacity(cell)[1], right=True),
        Column(name="samples/s", read=lambda cell: _format_rate(cell.samples_per_second, cell.spread), right=True),
        Column(name="tokens/s", read=lambda cell: _format_rate(cell.tokens_per_second, None), right=True, spare=3),
        Column(name=f"× cell {reference or 1}", read=partial(_format_ratio, reference), right=True),
        *(
            Column(name=tier, read=partial(_gauge, tier), right=True, spare=1 if tier == "device" else 5)
            for tier in TIERS
        ),
        Column(
            name="sent\na step",
            read=lambda cell: format_bytes(cell.sent_bytes) if cell.sent_bytes else "",
            right=True,
            spare=6,
        ),
    ]


def _format_axis_value(name: str, cell: CellResult) -> str:
    text = format_value(cell.values.get(name))
    return f"({text})" if name in cell.unheeded else text


def _describe_outcome(cell: CellResult) -> Words:
    mark = MARKS[cell.status]
    if cell.same_as is not None:
        return line((f"= {cell.same_as}", "dim"))
    if cell.status != "out_of_memory" or cell.tier is None:
        return line((mark.sign, mark.style))
    missing = "full" if cell.missing_bytes is None else f"lacks ≥ {format_bytes(cell.missing_bytes)}"
    return line((f"{mark.sign} {cell.tier} {missing}", mark.style))


def _format_capacity(cell: CellResult) -> tuple[str, str]:
    """The largest micro batch by the forecast and by trials; the latter is exact, ± or a lower bound."""
    capacity = cell.capacity
    if capacity is None:
        return "", ""
    bound = "" if capacity.exact else " ±" if capacity.refused else " or more"
    forecast = "" if capacity.forecast is None else f"{capacity.forecast:,}"
    return forecast, "" if capacity.verified is None else f"{capacity.verified:,}{bound}"


def _format_rate(rate: float | None, spread: float | None) -> str:
    if rate is None:
        return ""
    return format_rate(rate) + (f" ±{spread:.{0 if spread > 0.1 else 1}%}" if spread is not None else "")


def _gauge(tier: Tier, cell: CellResult) -> Cell:
    use = cell.memory.get(tier)
    if use is None or not use.peak_bytes:
        return ""
    share = use.peak_bytes / use.limit_bytes if use.limit_bytes else None
    return (doc.Gauge(words=format_bytes(use.peak_bytes), share=share),)


def _format_ratio(reference: int | None, cell: CellResult) -> Words:
    """'1.32', or '≈ 1.01' where that is within the noise."""
    if cell.number == reference:
        return line(("1", "dim"))
    if cell.ratio is None:
        return ""
    if cell.ratio.differs:
        return line((f"{cell.ratio.times:.2f}", "green" if cell.ratio.times > 1 else "yellow"))
    return line((f"≈ {cell.ratio.times:.2f}", "dim"))


def list_reasons(report: ProbeReport) -> Iterator[tuple[str, Words]]:
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
        yield _name_cells(numbers), reason


def _format_ranges(numbers: Iterable[int]) -> str:
    """'1-3, 7'."""
    by_offset = itertools.groupby(enumerate(sorted(set(numbers))), key=lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in by_offset]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def describe_answer(report: ProbeReport) -> doc.Headline:
    """'fastest: cell 2, zero1: 8.71 samples/s', the largest micro batch, or that nothing fits."""
    effort = f"{format_number_of(len(report.trials), 'trial')}, {format_seconds(report.seconds)}"
    if report.status == "nothing_fits":
        return doc.Headline(words=line(("no cell fits", "bold red")), effort=effort)
    fitting = [cell for cell in report.cells if cell.status == "fit" and cell.same_as is None]
    describe = _describe_largest if report.question.capacity else _describe_fastest
    head, doubt = describe(report, fitting)
    return doc.Headline(words=line((head, "bold green"), doubt), effort=effort)


def _describe_fastest(report: ProbeReport, fitting: Sequence[CellResult]) -> tuple[str, str]:
    """The cell with the highest ratio, the cells that are not told apart from it, and those without a ratio."""
    assert report.compared is not None
    reference, measure = report.compared
    same = Ratio(times=1.0, low=1.0, high=1.0)
    ratios = {cell.number: same if cell.number == reference else cell.ratio for cell in fitting}
    known = {number: ratio for number, ratio in ratios.items() if ratio is not None}
    best = max((cell for cell in fitting if cell.number in known), key=lambda cell: known[cell.number].times)
    ratio = known.pop(best.number)
    equal = [number for number, other in known.items() if not ratio.differs_from(other)]
    unknown = [number for number, other in ratios.items() if other is None]
    rate = f"{format_rate(_speed(best, measure))} {measure}/s"
    head = f"fastest: cell {best.number}, {_distinction(report, best)}: {rate}"
    doubt = f", within the noise of {_name_cells(equal)}" if equal else ""
    return head, doubt + (f"; without a ratio: {_name_cells(unknown)}" if unknown else "")


def _describe_largest(report: ProbeReport, fitting: Sequence[CellResult]) -> tuple[str, str]:
    """The cell with the largest micro batch, and the cells whose micro batch is as large or may be larger."""
    by_forecast = report.question.forecast_only
    bounds = {cell.number: _bound_capacity(cell, by_forecast=by_forecast) for cell in fitting}
    best = max(fitting, key=lambda cell: bounds[cell.number])
    most, limit = bounds.pop(best.number)
    forecast, verified = _format_capacity(best)
    size, source = (forecast, "the forecast") if by_forecast else (verified, "trials")
    head = f"largest micro batch: {size} with {_distinction(report, best)}, by {source}"
    equal = [number for number, bound in bounds.items() if limit == most and bound == (most, most)]
    larger = [number for number, (_, other_limit) in bounds.items() if other_limit > most]
    doubts = (("as large", equal), ("maybe larger", larger))
    return head, "".join(f"; {words} in {_name_cells(numbers)}" for words, numbers in doubts if numbers)


def _bound_capacity(cell: CellResult, *, by_forecast: bool) -> tuple[int, float]:
    """The largest micro batch that is known to fit, and the largest one that may."""
    capacity = cell.capacity
    assert capacity is not None
    if by_forecast:
        return capacity.forecast or 0, capacity.forecast or 0
    most = capacity.verified or 0
    if capacity.exact:
        return most, most
    return most, capacity.refused - 1 if capacity.refused is not None else math.inf


def _name_cells(numbers: Sequence[int]) -> str:
    """'cell 2', 'cells 1-3, 7'."""
    return f"cell{'s' if len(numbers) > 1 else ''} {_format_ranges(numbers)}"


def _explain_marks(report: ProbeReport) -> Iterator[doc.Part]:
    """What ≈ means, where a cell has it."""
    if report.compared is not None and any(cell.ratio is not None and not cell.ratio.differs for cell in report.cells):
        words = f"≈: not told apart from cell {report.compared[0]} by these measurements (95 %)"
        yield doc.Paragraph(words=line((words, "dim")))


def _speed(cell: CellResult, measure: str) -> float:
    return (cell.tokens_per_second if measure == "tokens" else cell.samples_per_second) or 0.0


def _distinction(report: ProbeReport, cell: CellResult, besides: str = "") -> str:
    """'zero1, micro_batch 4': the values that distinguish the cell, besides that of an axis."""
    varied = (name for name, values in report.axes.items() if len(values) > 1 or name == "rung")
    names = (name for name in varied if name != besides and name not in cell.unheeded)
    return ", ".join(_describe_value(name, cell.values[name]) for name in names)


_MEASURES: tuple[tuple[str, Callable[[CellResult], float | None], Callable[[float], str]], ...] = (
    ("samples/s", lambda cell: cell.samples_per_second, format_rate),
    ("device memory", lambda cell: cell.memory["device"].peak_bytes if "device" in cell.memory else None, format_bytes),
    (
        "largest micro batch",
        lambda cell: None if cell.capacity is None else cell.capacity.verified or cell.capacity.forecast,
        lambda most: f"{most:.0f}",
    ),
)


def list_charts(report: ProbeReport) -> Iterator[doc.Chart]:
    """Speed, device memory or the largest micro batch over each axis of whole numbers, a line for each other value."""
    for axis, values in report.axes.items():
        if len(values) < 2 or not all(type(value) is int and value > 0 for value in values):
            continue
        for title, read, format_measure in _MEASURES:
            lines: dict[str, dict[int, float]] = {}
            for cell in report.cells:
                place, value = cell.values.get(axis), read(cell)
                if isinstance(place, int) and cell.status == "fit" and value is not None:
                    name = _distinction(report, cell, besides=axis) or report.question.workload
                    lines.setdefault(name, {})[place] = float(value)
            drawn = dict(list(lines.items())[:_MOST_LINES])
            left_out = f", the first {_MOST_LINES} of {len(lines)} lines" if len(lines) > _MOST_LINES else ""
            limit = report.question.device_bytes if format_measure is format_bytes else None
            yield doc.Chart(
                title=f"{title} by {axis}{left_out}", lines=drawn, format_value=format_measure, x_name=axis, limit=limit
            )
