"""What each rung that was tried spends in communication: a line each."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from rich.text import Text

from ..outcomes import Collective, Communication, Fit
from ..units import show_bytes
from ..values import Record
from .result import Report

_LEAST = 0.01  # share of the bytes from which a collective is named


def lines_of(report: Report) -> Iterator[tuple[str, Text]]:
    """Rung → what a rank sends in an optimizer step, and what share of the step that takes where it was timed."""
    for rung, fit in _fits(report).items():
        assert fit.communication is not None
        samples = round(fit.samples_per_second * statistics.median(fit.step_s))
        yield rung, Text.assemble(_sum(fit.communication), (f"; a step of {_counted(samples, 'sample')}", "dim"))


def _fits(report: Report) -> dict[str, Fit]:
    """Rung → the fastest of its trials; one whose collectives were timed wins over one where they were only counted."""
    best: dict[str, Fit] = {}
    for record in sorted(report.trials, key=_order):
        fit = record.outcome
        if isinstance(fit, Fit) and fit.communication is not None and fit.communication.sent_bytes:
            best[record.trial.rung] = fit
    order = {rung: place for place, rung in enumerate(report.question.get("ladder", ()))}
    return dict(sorted(best.items(), key=lambda row: order.get(row[0], len(order))))


def _order(record: Record) -> tuple[bool, bool, float]:
    """The last is the most telling."""
    fit = record.outcome
    if not isinstance(fit, Fit) or fit.communication is None:
        return False, False, 0.0
    return record.trial.native_optimizer, fit.communication.share is not None, fit.samples_per_second


def _sum(said: Communication) -> str:
    share = f", {said.share:.0%} of a step where nothing overlaps" if said.share is not None else ""
    named = {name: op for name, op in said.ops.items() if op.sent_bytes >= _LEAST * said.sent_bytes}
    parts = ", ".join(_op(name, op) for name, op in sorted(named.items(), key=lambda item: -item[1].sent_bytes))
    return f"sends {show_bytes(said.sent_bytes)}{share}: {parts}"


def _op(name: str, op: Collective) -> str:
    return f"{name} {show_bytes(op.sent_bytes)} in {_counted(op.calls, 'call')}"


def _counted(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"
