"""The result of a probe, as a value, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from ..outcomes import TIERS, Tier, TierUse
from ..values import Record, Scalar
from .files import _plain, _trial_row

PROBE = "probe.json"
PROBE_CSV = "probe.csv"

CellStatus = Literal["fit", "out_of_memory", "failed", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How many times as fast as the cell that all are compared with, with an interval of 95 %."""

    times: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """By more than the noise of the measurements."""
        return not self.low <= 1 <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The largest micro batch.

    forecast: by the simulated device; None: none fits, or it could not be simulated. verified: the largest that trials
    showed to fit; None: none did, or there were no trials. refused: the smallest that trials showed not to fit.
    exact: nothing is left between the two. said: how they compare, in a sentence.
    """

    forecast: int | None = None
    verified: int | None = None
    refused: int | None = None
    exact: bool = False
    said: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """One combination of values, and what came of it.

    values: axis → value; None: not set. reason: why it did not fit or was not run. unheeded: axes that mean nothing
    here, and why. same_as: the cell whose trials these are. samples_per_second, tokens_per_second: medians of
    `repeats` trials; spread: their relative standard deviation. sent_bytes: by a rank in an optimizer step. memory: the
    highest peaks. missing_bytes: on `tier`, at least. trials: ids.
    """

    number: int
    values: Mapping[str, Scalar | None]
    status: CellStatus
    reason: str = ""
    unheeded: Mapping[str, str] = field(default_factory=dict)
    same_as: int | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    spread: float | None = None
    ratio: Ratio | None = None
    repeats: int = 0
    step_s: float | None = None
    sent_bytes: int | None = None
    memory: Mapping[Tier, TierUse] = field(default_factory=dict)
    tier: Tier | None = None
    missing_bytes: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    checkpointing: bool | None = None
    capacity: Capacity | None = None
    trials: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """What a probe measured.

    status: nothing_fits when no cell did. compared: the number of the cell that ratios are to, and by which measure.
    notes: what holds of all cells, in sentences. question: what was asked.
    """

    status: Literal["done", "nothing_fits"]
    axes: Mapping[str, tuple[Scalar | None, ...]]
    cells: tuple[CellResult, ...]
    compared: tuple[int, Literal["samples", "tokens"]] | None = None
    notes: tuple[str, ...] = ()
    trials: tuple[Record, ...] = ()
    question: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    hardware: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    out: str = ""


def to_dict(report: ProbeReport) -> dict[str, Any]:
    """Plain JSON values; what is not known is null."""
    row = {item.name: getattr(report, item.name) for item in fields(ProbeReport)}
    row["cells"] = [_cell_row(cell) for cell in report.cells]
    row["compared"] = dict(zip(("cell", "by"), report.compared, strict=True)) if report.compared else None
    row["trials"] = [_trial_row(record) for record in report.trials]
    said: dict[str, Any] = _plain(row)
    return said


def _cell_row(cell: CellResult) -> dict[str, Any]:
    row = asdict(cell)
    if cell.ratio is not None:
        row["ratio"]["differs"] = cell.ratio.differs
    row["memory"] = {tier: row["memory"].get(tier) for tier in TIERS}
    return row


def to_csv(report: ProbeReport) -> str:
    """One line a cell: its values, then what was measured; bytes and seconds are plain numbers."""
    text = io.StringIO()
    rows = [dict(_flat(report, cell)) for cell in report.cells]
    writer = csv.DictWriter(text, fieldnames=list(dict.fromkeys(name for row in rows for name in row)), restval="")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(report: ProbeReport, cell: CellResult) -> Iterator[tuple[str, Any]]:
    yield "cell", cell.number
    for name in report.axes:
        yield name, _text(cell.values.get(name))
    for name in (
        "status",
        "same_as",
        "repeats",
        "samples_per_second",
        "tokens_per_second",
        "spread",
        "step_s",
        "sent_bytes",
    ):
        yield name, _text(getattr(cell, name))
    for name in ("times", "low", "high", "differs"):
        yield f"ratio_{name}", _text(getattr(cell.ratio, name, None))
    for tier in TIERS:
        use = cell.memory.get(tier)
        yield f"{tier}_peak_bytes", _text(use.peak_bytes if use else None)
        yield f"{tier}_limit_bytes", _text(use.limit_bytes if use else None)
    for name in ("tier", "missing_bytes"):
        yield name, _text(getattr(cell, name))
    if cell.capacity is not None:
        for name in ("forecast", "verified", "refused", "exact"):
            yield f"largest_{name}", _text(getattr(cell.capacity, name))
    said = [cell.reason, cell.capacity.said if cell.capacity else "", *cell.unheeded.values()]
    yield "reason", "; ".join(" ".join(part.split()) for part in said if part)


def _text(value: object) -> object:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else value
