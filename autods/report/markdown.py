"""Finished fits as Markdown: what was asked, the answer and the ladder, side by side where there are several."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..types import TIERS, Fit
from ..units import format_bytes
from . import fit_view
from .results.fit import FitReport
from .text import format_outcome, format_rate, format_use


def to_markdown(reports: Sequence[FitReport]) -> str:
    """A table with a column for each fit, and below it the ladder of each."""
    rows: tuple[tuple[str, Callable[[FitReport], str]], ...] = (
        ("asked", fit_view.describe_question),
        ("answer", lambda report: report.rung or f"nothing fits: {fit_view.describe_shortage(report)}"),
        ("batch", _describe_batch),
        ("samples/s", lambda report: format_rate(report.throughput.samples_per_second) if report.throughput else ""),
        ("memory", _describe_memory),
        ("certificate", _describe_certificate),
        ("effort", fit_view.describe_effort),
        ("versions", lambda report: ", ".join(f"{name} {version}" for name, version in report.versions.items())),
    )
    heads = [escape(report.out) for report in reports]
    lines = [f"| | {' | '.join(heads)} |", f"|---|{'---|' * len(reports)}"]
    lines += [f"| {name} | {' | '.join(escape(read(report)) for report in reports)} |" for name, read in rows]
    for report in reports:
        lines += [
            "",
            f"Ladder of {escape(report.out)}:",
            "",
            "| rung | outcome | device memory | samples/s |",
            "|---|---|---|---|",
        ]
        lines += _ladder_rows(report)
    return "\n".join(lines)


def escape(text: str) -> str:
    """Text for a cell of a table: what Markdown or HTML would read as its own is escaped."""
    for mark, instead in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|"), ("`", "\\`")):
        text = text.replace(mark, instead)
    return " ".join(text.split())


def _describe_batch(report: FitReport) -> str:
    if report.knobs is None:
        return ""
    checkpointing = "on" if report.knobs.checkpointing else "off"
    return f"{report.knobs.micro_batch} × {report.knobs.accumulation}, checkpointing {checkpointing}"


def _describe_memory(report: FitReport) -> str:
    return ", ".join(f"{tier} {format_use(report.memory[tier])}" for tier in TIERS if tier in report.memory)


def _describe_certificate(report: FitReport) -> str:
    if report.question.rehearsed_on is not None:
        return "not proven: a rehearsal"
    return "" if report.certificate is None else str(fit_view.certificate_headline(report.certificate)).strip()


def _ladder_rows(report: FitReport) -> list[str]:
    lines = []
    for rung, row in fit_view.ladder_rows(report).items():
        if isinstance(row, str):
            lines.append(f"| {escape(rung)} | skipped: {escape(row)} | | |")
            continue
        outcome = row.outcome
        use = outcome.memory.get("device") if isinstance(outcome, Fit) else None
        peak = format_bytes(use.peak_bytes) if use is not None and use.peak_bytes else ""
        rate = format_rate(outcome.samples_per_second) if isinstance(outcome, Fit) else ""
        text = "fits" if isinstance(outcome, Fit) else format_outcome(outcome)
        lines.append(f"| {escape(rung)} | {escape(text)} | {peak} | {rate} |")
    return lines
