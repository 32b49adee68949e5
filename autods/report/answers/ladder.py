"""The ladder of a fit: what became of each rung, and why, as the answer and the live view show it.

A row is a `LadderRow`, and a column is one entry of `LADDER`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ...config.checkpointing import find_state
from ...forecast.predict.verdict import find_deciding_tier
from ...forecast.values import RungForecast
from ...types import TIERS, Fit, Knobs, OutOfMemory, Record, Tier, TierUse, Trial
from ...units import format_bytes, format_factor
from .. import document as doc
from ..document import Cell, Column, Medium, Words, line
from ..results.fit import FitReport
from ..results.measured import Measured, find_measured, measure_configs
from ..text import MARKS, Mark, format_outcome, format_rate, format_use
from ..trial_names import unusual_knobs
from .trials import sort_by_ladder

NOT_TRIED = "not tried: "  # begins the reason of what the search left out


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderRow:
    """What became of a rung: its fastest config or its most telling trial, or why it was skipped, and its forecast.

    `memory` has the peaks by tier. `rate` is in samples a second. `measured` is what the device held in the trial that
    `forecast` was made for.
    """

    rung: str
    wins: bool
    mark: Mark
    reason: str
    memory: Cell = ""
    rate: float | None = None
    forecast: RungForecast | None = None
    measured: TierUse | None = None


LADDER: tuple[Column[LadderRow], ...] = (
    Column(name="rung", read=lambda row: line((row.rung, "bold" if row.wins else ""))),
    Column(name="outcome", read=lambda row: row.mark.words),
    Column(name="peak / limit", read=lambda row: row.memory),
    Column(name="forecast", read=lambda row: _stack_forecast(row), on=Medium.PAGE),
    Column(name="samples/s", read=lambda row: _format_row_rate(row), right=True),
    Column(name="why", read=lambda row: row.reason, wraps=True, least_width=36, spare=1, below=True),
)


def _stack_forecast(row: LadderRow) -> Cell:
    if row.forecast is None or "device" not in row.forecast.memory:
        return ""
    peak, limit = (None, None) if row.measured is None else (row.measured.peak_bytes, row.measured.limit_bytes)
    return (doc.MemoryStack(forecast=row.forecast, measured_bytes=peak, trial_limit_bytes=limit),)


def _format_row_rate(row: LadderRow) -> Words:
    return "" if row.rate is None else line((format_rate(row.rate), "bold" if row.wins else ""))


def list_ladder(report: FitReport) -> list[LadderRow]:
    """A row for each rung that was tried, skipped or refused by the forecast, in the order of the ladder."""
    return [_make_row(report, rung, trial) for rung, trial in find_telling_trials(report).items()]


def _make_row(report: FitReport, rung: str, trial: Record | str) -> LadderRow:
    """The row of a rung with its most telling trial, or why it was skipped."""
    forecast = next((forecast for forecast in report.forecast if forecast.rung == rung), None)
    wins = report.status == "fit" and rung == report.rung
    measured = find_fastest(report, rung)
    shown = measured.trial if measured is not None else None if isinstance(trial, str) else trial.trial
    mark, memory, rate = MARKS["skipped" if isinstance(trial, str) else trial.outcome.kind], list[doc.Gauge](), None
    match trial if isinstance(trial, str) else trial.outcome:
        case str() if forecast is not None and forecast.verdict == "cannot_fit" and forecast.memory:
            tier, mark = find_deciding_tier(forecast.memory), MARKS["cannot_fit"]
            needed = forecast.memory[tier]
            memory = [gauge_use(tier, TierUse(peak_bytes=needed.peak_bytes, limit_bytes=needed.limit_bytes), "~")]
        case Fit() if measured is not None:
            uses, rate = measured.memory, measured.samples_per_second
            if wins and report.throughput is not None:  # the answer's, where only its walk was timed
                uses, rate = report.memory, report.throughput.samples_per_second
            if not measured.leaves_headroom(find_usable(report)):
                mark = MARKS["no_headroom"]
            memory = list(_gauge_uses(uses))
        case OutOfMemory(tier=tier, limit_bytes=int(limit), missing_bytes=int(missing)):
            memory = [gauge_use(tier, TierUse(peak_bytes=limit + missing, limit_bytes=limit), "≥")]
        case OutOfMemory(tier=tier, limit_bytes=int(limit)):
            memory = [doc.Gauge(words=line((f"{tier:<8}", "dim"), f"full: {format_bytes(limit)}"), share=1.0)]
        case _:
            pass
    failed_exam = None if wins or shown is None else describe_failed_exam(report, shown)
    doubt = "but not proven" if was_backed_off(report) else "within noise"
    if failed_exam is not None:
        doubt = f"but {failed_exam}"
    elif mark == MARKS["no_headroom"]:
        doubt = ""
    return LadderRow(
        rung=rung,
        wins=wins,
        mark=mark,
        reason=join_sentences(
            None if wins else _compare_with_answer(report, rate, doubt) or failed_exam,
            # Who won before the exam says nothing of a config that failed in it.
            None if failed_exam is not None else _find_reason(report, rung, shown) or _describe_end(trial),
        ),
        memory=tuple(memory),
        rate=rate,
        forecast=forecast,
        measured=None if forecast is None else _find_measured(report, forecast),
    )


def _find_reason(report: FitReport, rung: str, shown: Trial | None) -> str | None:
    """Why the config that a row shows was left or chosen. One that is not the answer says how it is unusual."""
    variant = "" if shown is None else _name_variant(report, shown)
    reason = report.reasons.get(f"{rung} {variant}") if variant else None
    if shown is None or reason is None:
        return report.reasons.get(rung)
    return reason if shown.knobs == report.knobs and rung == report.rung else f"{variant}: {reason}"


def _name_variant(report: FitReport, trial: Trial) -> str:
    """'without checkpointing': how a trial's config differs from its rung's usual one; '' for that.

    Its allocator's segments make no variant: the forecast chooses them for each trial.
    """
    return unusual_knobs(replace(trial.knobs, expandable=False), recomputes=can_recompute(report))


def can_recompute(report: FitReport) -> bool:
    """Whether the model can. Reports of before it was kept tell by their trials, or by how the search named them."""
    if report.question.checkpointing is not None:
        return report.question.checkpointing
    keeping = unusual_knobs(Knobs(checkpointing=False), recomputes=True)
    is_tried = any(record.trial.knobs.checkpointing for record in report.trials)
    return is_tried or any(keeping in name for name in report.reasons)


def _compare_with_answer(report: FitReport, rate: float | None, doubt: str) -> str | None:
    """'0.81 times as fast as zero3', of a rung that fitted but is not the answer; None before there is an answer.

    One that is faster than the answer has the `doubt` behind it.
    """
    if rate is None or report.throughput is None or report.question.objective == "memory":
        return None
    ratio = rate / report.throughput.samples_per_second
    return f"{format_factor(ratio)} times as fast as {report.rung}{f', {doubt}' if doubt and ratio > 1 else ''}"


def describe_failed_exam(report: FitReport, config: Trial) -> str | None:
    """'ran out of memory on device in the certificate's exam', of a config that it therefore left; None without one."""
    for record in report.trials:
        trial, outcome = record.trial, record.outcome
        if trial.exam is None or isinstance(outcome, Fit) or trial.rung != config.rung:
            continue
        if trial.knobs.micro_batch == config.knobs.micro_batch and find_state(trial.knobs) == find_state(config.knobs):
            end = f"ran out of {outcome.lacked}" if isinstance(outcome, OutOfMemory) else "failed"
            return f"{end} in the certificate's exam"
    return None


def was_backed_off(report: FitReport) -> bool:
    """Whether the certificate took another config than the fastest, which may be clearly faster."""
    return report.certificate is not None and bool(report.certificate.backed_off)


def join_sentences(*sentences: str | None) -> str:
    return "; ".join(filter(None, sentences))


def list_used_tiers(uses: Mapping[Tier, TierUse]) -> list[Tier]:
    """The tiers that hold anything; the device always."""
    return [tier for tier in TIERS if tier in uses and (uses[tier].peak_bytes or tier == "device")]


def _describe_end(trial: Record | str) -> str:
    """Why a rung did not fit; nothing where it did, because its row has the figures."""
    if isinstance(trial, str):
        return trial
    return "" if isinstance(trial.outcome, Fit) else format_outcome(trial.outcome)


def _gauge_uses(uses: Mapping[Tier, TierUse]) -> Iterator[doc.Gauge]:
    """A line for each tier that holds anything; before a card's what was in use there, which decides."""
    for tier in list_used_tiers(uses):
        whole = replace(uses[tier], in_use_bytes=None)
        if (in_use_bytes := uses[tier].in_use_bytes) is not None:
            in_use = replace(whole, peak_bytes=in_use_bytes)
            if format_use(in_use) != format_use(whole):
                yield gauge_use("in use", in_use)
        yield gauge_use(tier, whole)


def gauge_use(name: str, use: TierUse, sign: str = " ") -> doc.Gauge:
    """One tier's memory. `sign` is ≥ for a lower bound and ~ for a forecast."""
    share = use.peak_bytes / use.limit_bytes if use.limit_bytes and sign != "~" else None
    return doc.Gauge(words=line((f"{name:<7}", "dim"), sign, format_use(use)), share=share)


def find_fastest(report: FitReport, rung: str) -> Measured | None:
    """The config of a rung that its row speaks of: the answer, else the best one; None where none fitted.

    Those that left the headroom of the search go before others, and then finalists, since one timing may flatter. Where
    memory is the objective, the leanest is the best.
    """
    configs = [config for config in measure_configs(report.trials) if config.trial.rung == rung]
    if rung == report.rung and report.knobs is not None:
        answer = find_measured(report.trials, rung, report.knobs)
        configs = configs if answer is None else [answer]
    usable_bytes, by_memory = find_usable(report), report.question.objective == "memory"

    def rank(config: Measured) -> tuple[bool, bool, float]:
        return config.leaves_headroom(usable_bytes), config.is_finalist, config.score(by_memory=by_memory)

    return max(configs, key=rank, default=None)


def find_usable(report: FitReport) -> float:
    """A rank's device memory without the headroom of the search; infinite where it is not known."""
    return report.question.usable_bytes or math.inf


def find_telling_trials(report: FitReport) -> dict[str, Record | str]:
    """Return the most telling trial of each rung, or why it was skipped, in the ladder's order."""

    def order(record: Record) -> tuple[bool, bool, float]:
        """The most telling last: the winning knobs, else the fastest fit that is no exam, else the later trial."""
        wins = record.trial.rung == report.rung and record.trial.knobs == report.knobs
        if not isinstance(record.outcome, Fit):
            return wins, False, 0.0
        return wins, True, record.outcome.samples_per_second if record.trial.exam is None else 0.0

    def is_of_the_rung(trial: Trial) -> bool:
        return trial.purpose == "walk" or not _name_variant(report, trial)

    def is_telling(record: Record) -> bool:
        """Whether it is under the limit, as those are not which measure what would be enough.

        A variant that did not fit tells nothing of a rung that itself was not tried.
        """
        return record.trial.limited and (isinstance(record.outcome, Fit) or record.trial.rung in tried)

    tried = {record.trial.rung for record in report.trials if is_of_the_rung(record.trial)}
    unfit = {each.rung for each in report.forecast if each.verdict == "cannot_fit"}
    rows: dict[str, Record | str] = {
        rung: reason for rung, reason in report.reasons.items() if rung in unfit and not reason.startswith(NOT_TRIED)
    }
    rows |= {skipped.rung: skipped.reason for skipped in report.skipped}
    limited = filter(is_telling, report.trials)
    rows |= {record.trial.rung: record for record in sorted(limited, key=order)}
    return sort_by_ladder(report, rows)


def _find_measured(report: FitReport, forecast: RungForecast) -> TierUse | None:
    """What the trial that the forecast was made for held on the device, if it fitted."""
    for record in report.trials:
        trial = record.trial
        if trial.rung == forecast.rung and trial.knobs.micro_batch == forecast.micro_batch:
            return record.outcome.memory.get("device") if isinstance(record.outcome, Fit) else None
    return None
