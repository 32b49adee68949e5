"""Phrases and layout that several views share."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table

from ..types import Failed, Fit, Knobs, Outcome, OutOfMemory, Phase, Record, TierUse, first_line
from ..units import choose_unit, format_bytes


def format_outcome(outcome: Outcome) -> str:
    """'out of memory on device, rank 1, init: wanted 124.5 MiB, 35.1 MiB free of 416.0 MiB'."""
    match outcome:
        case Fit():
            device = outcome.memory.get("device")
            peak = f"{format_use(device)}, " if device else ""
            pressed = f", its allocator ran full {outcome.alloc_retries} times" if outcome.alloc_retries else ""
            examined = ", examined" if outcome.examined is not None else ""
            return f"fits: {peak}{format_rate(outcome.samples_per_second)} samples/s{pressed}{examined}"
        case OutOfMemory():
            return f"out of memory on {outcome.tier}, {_place(outcome)}: {format_shortage(outcome)}"
        case Failed():
            kind = outcome.failure.replace("_", " ")
            return f"failed ({kind}), {_place(outcome)}: {first_line(outcome.evidence)}"


def format_shortage(outcome: OutOfMemory) -> str:
    """'wanted 124.5 MiB, 35.1 MiB free of 416.0 MiB', or the evidence when the numbers are not known."""
    limit = f" of {format_bytes(outcome.limit_bytes)}" if outcome.limit_bytes is not None else ""
    free = f"{format_bytes(outcome.free_bytes)} free{limit}" if outcome.free_bytes is not None else ""
    if outcome.wanted_bytes is None:
        return ", ".join(part for part in (first_line(outcome.evidence).rstrip("."), free) if part)
    return f"wanted {format_bytes(outcome.wanted_bytes)}{', ' + free if free else limit}"


def format_use(use: TierUse) -> str:
    """'380.0 / 416.0 MiB': peak and limit in the limit's unit; the peak alone where nothing limits it."""
    if use.limit_bytes is None:
        return format_bytes(use.peak_bytes)
    name, factor = choose_unit(use.limit_bytes)
    if use.peak_bytes * 10 < factor:  # 3.0 MiB / 62.8 GiB would read 0.0 / 62.8 GiB
        return f"{format_bytes(use.peak_bytes)} / {format_bytes(use.limit_bytes)}"
    digits = 1 if factor > 1 else 0
    return f"{use.peak_bytes / factor:.{digits}f} / {use.limit_bytes / factor:.{digits}f} {name}"


def format_rate(per_second: float) -> str:
    """Three significant digits, no exponent: '0.0412', '12.3', '1,234'."""
    if per_second >= 100:
        return f"{per_second:,.0f}"
    return f"{per_second:.3g}" if per_second >= 1e-3 else f"{per_second:.1e}"


def format_seconds(seconds: float) -> str:
    """'4.2 s', '3 min 20 s', '2 h 5 min'."""
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def format_batch(knobs: Knobs, ranks: int, name: str = "ranks") -> str:
    """'4 micro batch × 2 accumulation × 2 ranks = 16 train batch'; name: of what holds the model once, with others."""
    parts = f"{knobs.micro_batch} micro batch × {knobs.accumulation} accumulation × {ranks} {name}"
    return f"{parts} = {knobs.train_batch(ranks)} train batch"


def format_ranks(count: int, device: str) -> str:
    """'2 cpu ranks', '1 cuda rank'."""
    return f"{count} {device} rank{'' if count == 1 else 's'}"


def format_phase(phase: Phase, step: int) -> str:
    """'backward, step 2'; the step only where there are steps."""
    return f"{phase}, step {step}" if phase in ("forward", "backward", "step") and step else phase


def format_record(record: Record, *, replayed: bool = False, label: str = "") -> str:
    """A finished trial as one plain line; label: what else is to be said of it."""
    trial = record.trial
    end = "from the journal" if replayed else format_seconds(record.seconds)
    unlimited = "" if trial.limited else " without limit"
    asked = f"micro batch {_batch(trial.knobs)} ({trial.purpose}{unlimited})" + (f", {label}" if label else "")
    return f"trial {record.id}: {trial.rung}, {asked}: {format_outcome(record.outcome)} [{end}]"


def _batch(knobs: Knobs) -> str:
    """'12', or '12 × 4' where a step has several."""
    return f"{knobs.micro_batch}" + (f" × {knobs.accumulation}" if knobs.accumulation > 1 else "")


def _place(outcome: OutOfMemory | Failed) -> str:
    rank = f"rank {outcome.rank}" if outcome.rank >= 0 else "node"
    return f"{rank}, {format_phase(outcome.phase, outcome.step)}"


def pairs_grid(pairs: Iterable[tuple[str, RenderableType]]) -> RenderableType:
    """Names and what is said of them; long text wraps in its own column."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, said in pairs:
        table.add_row(name, said)
    return Padding(table, (0, 0, 0, 2))
