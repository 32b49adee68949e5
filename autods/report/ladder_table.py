"""What became of each rung: one row each."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..outcomes import TIERS, Fit, OutOfMemory, Tier, TierUse
from ..units import show_bytes
from ..values import Record
from . import words
from .progress import mark_of
from .result import Report


def foretold(report: Report) -> dict[str, TierUse]:
    """Rungs that were not tried because they cannot fit → what their device would have had to hold."""
    tried = {record.trial.rung for record in report.trials}
    return {
        row["rung"]: TierUse(peak_bytes=row["device"]["peak_bytes"], limit_bytes=row["device"]["limit_bytes"])
        for row in report.forecast
        if row["verdict"] == "cannot_fit" and row.get("device") and row["rung"] not in tried
    }


def rows_of(report: Report) -> dict[str, Record | str]:
    """Rung → the trial that stands for it, or why it was skipped; in the ladder's order where the question names it."""
    rows: dict[str, Record | str] = {}
    for record in report.trials:
        if record.trial.limited:  # one without a limit only asks how much would have been enough
            rows[record.trial.rung] = _telling(report, rows.get(record.trial.rung), record)
    for skipped in report.skipped:
        rows.setdefault(skipped.rung, skipped.reason)
    order = {rung: place for place, rung in enumerate(report.question.get("ladder", ()))}
    return dict(sorted(rows.items(), key=lambda row: order.get(row[0], len(order))))


def untried(report: Report) -> dict[str, list[str]]:
    """Why rungs of the ladder were neither tried nor skipped → those rungs."""
    known, groups = rows_of(report), dict[str, list[str]]()
    for rung in report.question.get("ladder", ()):
        if rung not in known and rung in report.reasons:
            groups.setdefault(report.reasons[rung], []).append(rung)
    return groups


def _telling(report: Report, before: Record | str | None, record: Record) -> Record:
    """Which of two trials of one rung stands for it: the one with the winning knobs, else the fastest fit with the
    rung's own optimizer, else the later one."""
    if not isinstance(before, Record):
        return record
    for one in (before, record):
        if one.trial.rung == report.rung and one.trial.knobs == report.knobs:
            return one
    if not (isinstance(before.outcome, Fit) and before.trial.native_optimizer):
        return record
    usual = isinstance(record.outcome, Fit) and record.trial.exam is None and record.trial.native_optimizer
    return max(before, record, key=_speed) if usual else before


def _speed(record: Record) -> float:
    return record.outcome.samples_per_second if isinstance(record.outcome, Fit) else 0.0


def ladder_table(report: Report, *, wide: bool) -> Table:
    """rung, outcome, peak / limit, samples/s and, where there is room, why."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), expand=wide)
    table.add_column("rung", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    table.add_column("peak / limit", no_wrap=True)
    table.add_column("samples/s", justify="right", no_wrap=True)
    if wide:
        table.add_column("why", ratio=1)
    reasons, told = dict(reasons_of(report)), foretold(report)
    for rung, row in rows_of(report).items():
        winner = report.status == "fit" and rung == report.rung
        cells: list[RenderableType] = [Text(rung, style="bold" if winner else "")]
        if rung in told:
            cells += [Text("✗ cannot fit", style="red"), _use("device", told[rung], sign="~"), Text()]
        else:
            cells += [_verdict(row), _memory(report, row, winner), _rate(report, row, winner)]
        table.add_row(*cells, *([Text(reasons.get(rung, ""))] if wide else []))
    return table


def _verdict(row: Record | str) -> Text:
    if isinstance(row, str):
        return Text("– skipped", style="dim")
    mark, style = mark_of(row.outcome)
    said = {"fit": "fits", "out_of_memory": "out of memory", "failed": "failed"}[row.outcome.kind]
    return Text(f"{mark} {said}", style=style)


def _memory(report: Report, row: Record | str, winner: bool) -> Text:
    """One line a tier. A rung that ran out shows the least it would have needed."""
    if isinstance(row, str):
        return Text()
    match row.outcome:
        case Fit():
            memory = report.memory if winner and report.memory else row.outcome.memory
            return Text("\n").join(_use(tier, memory[tier]) for tier in TIERS if tier in memory)
        case OutOfMemory(limit_bytes=int(limit), missing_bytes=int(missing)):
            return _use(row.outcome.tier, TierUse(peak_bytes=limit + missing, limit_bytes=limit), sign="≥")
        case OutOfMemory(limit_bytes=int(limit)):
            return Text.assemble((f"{row.outcome.tier:<8}", "dim"), f"full: {show_bytes(limit)}")
        case _:
            return Text()


def _use(tier: Tier, use: TierUse, *, sign: str = " ") -> Text:
    """sign: ≥ for a lower bound, ~ for a forecast."""
    return Text.assemble((f"{tier:<7}", "dim"), sign, words.of_use(use))


def _rate(report: Report, row: Record | str, winner: bool) -> Text:
    if winner and report.throughput:
        return Text(words.of_rate(report.throughput.samples_per_second), style="bold")
    if isinstance(row, str) or not isinstance(row.outcome, Fit):
        return Text()
    return Text(words.of_rate(row.outcome.samples_per_second))


def reasons_of(report: Report) -> Iterator[tuple[str, str]]:
    """Each rung's reason: the search's own words, else what its trial said."""
    for rung, row in rows_of(report).items():
        said = row if isinstance(row, str) else words.of_outcome(row.outcome)
        yield rung, report.reasons.get(rung, said)


def variants_of(report: Report) -> Iterator[tuple[str, str]]:
    """Rungs that also raced with something unusual, such as without checkpointing, and what came of it."""
    rungs = report.question.get("ladder", ())
    for name, reason in report.reasons.items():
        if name not in rungs and name.partition(" ")[0] in rungs:
            yield name, reason
