"""Trials in a document: each with its log, what they measured by micro batch, and what their ranks sent."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ...config.checkpointing import PARTIAL, find_state
from ...system.host import Hardware
from ...system.processes import read_tail
from ...types import Fit, Record, Scalar
from ...units import format_bytes
from .. import document as doc
from ..document import Medium, Words, line
from ..results.fit import FitReport
from ..results.measured import has_headroom, measure_configs
from ..text import MARKS, format_number_of, format_outcome, format_rate, format_seconds
from ..trial_names import LabelTrial, name_trial

_TAIL_BYTES = 4000  # of each log; a page stays small whatever a script prints
_MOST_LOGS = 40
_LEAST_SHARE = 0.01  # of the bytes sent, from which a collective is named
Row = TypeVar("Row")


def list_trials(
    records: Sequence[Record], folder: Path | None, label: LabelTrial, *, usable_bytes: float = math.inf
) -> doc.Details:
    """Each trial with its knobs, its outcome, and the end of the log of a trial that failed.

    `label` says what is unusual about a trial. `folder` is that of the fit or the probe; None leaves out the logs.
    Where many trials failed, the later ones only say where their log is. `usable_bytes` are those of a fit's question.
    """
    unfit = [record.id for record in records if not isinstance(record.outcome, Fit)]
    quoted = set(unfit[:_MOST_LOGS]) if folder is not None else set()
    details = []
    for record in records:
        outcome, knobs = record.outcome, record.trial.knobs
        settings = {"checkpointing": knobs.checkpointing, "accumulation": knobs.accumulation, **knobs.settings}
        settings |= {"expandable_segments": True} if knobs.expandable else {}
        settings |= {"keeps_headroom": True} if knobs.keeps_headroom else {}
        log = pointer = ""
        if folder is not None and not isinstance(outcome, Fit):
            place = f"logs/{record.id:03d}-{record.trial.rung}/rank{max(0, outcome.rank)}.log"
            if record.id in quoted:
                log = read_tail(folder / place, _TAIL_BYTES)
            else:
                pointer = f"Its log is {place}: this page quotes those of the first {_MOST_LOGS} failed trials."
        counts = has_headroom(record, usable_bytes)
        summary = line(
            f"{record.id}: {name_trial(record.trial, label(record.trial))}: ",
            (format_outcome(outcome, counts=counts), MARKS[outcome.kind if counts else "no_headroom"].style),
            (f" [{format_seconds(record.seconds)}]", "dim"),
        )
        sentences = [", ".join(f"{key} {value}" for key, value in {**settings, **record.trial.conditions}.items())]
        sentences += [] if isinstance(outcome, Fit) else [outcome.evidence, outcome.advice, pointer]
        details.append(doc.Detail(summary=summary, sentences=tuple(filter(None, sentences)), text=log))
    return doc.Details(items=tuple(details))


def describe_machine(hardware: Hardware | None, versions: Mapping[str, str]) -> doc.Pairs:
    """The machine, where it is known, and the versions."""
    machine: list[tuple[str, str]] = []
    if hardware is not None:
        kinds = Counter(f"{card.name} ({format_bytes(card.total_bytes)})" for card in hardware.cards)
        cards = ", ".join(f"{count} × {kind}" if count > 1 else kind for kind, count in kinds.items())
        machine = [
            ("processor", f"{hardware.cpu}, {format_number_of(hardware.cores, 'core')}"),
            ("host memory", format_bytes(hardware.host_bytes)),
            ("cards", cards or "none"),
            ("driver", hardware.driver or "none"),
        ]
    return doc.Pairs(items=(*machine, *sorted(versions.items())), on=Medium.PAGE)


# What they measured.


def chart_trials(
    records: Sequence[Record], limit_bytes: int | None = None, *, usable_bytes: float = math.inf
) -> Iterator[doc.Chart]:
    """Samples a second and the device's peak by micro batch, a line for each rung with and without checkpointing.

    Configs with other settings than a rung's first one, such as those of tuning, have a line of their own. Those that
    leave no headroom of the usable bytes have one, too. A line shows the fastest of several with one micro batch.
    """
    speeds: dict[str, dict[int, float]] = {}
    peaks: dict[str, dict[int, float]] = {}
    configs = measure_configs(records)
    usual: dict[str, Mapping[str, Scalar]] = {}
    for config in configs:
        usual.setdefault(config.trial.rung, config.trial.knobs.settings)
    for config in configs:
        rung, knobs, rate = config.trial.rung, config.trial.knobs, config.samples_per_second
        state = find_state(knobs)
        name = f"{rung}, no checkpointing" if state == "off" else rung
        name += f", checkpointing {state}" if state in PARTIAL else ""
        name += "" if knobs.settings == usual[rung] else ", other settings"
        name += "" if config.leaves_headroom(usable_bytes) else ", no headroom"
        if rate > speeds.setdefault(name, {}).get(knobs.micro_batch, 0.0):
            speeds[name][knobs.micro_batch] = rate
            peaks.setdefault(name, {})[knobs.micro_batch] = float(config.device_peak_bytes)
    yield doc.Chart(title="samples/s by micro batch", lines=speeds, format_value=format_rate)
    yield doc.Chart(
        title="device memory in use by micro batch", lines=peaks, format_value=format_bytes, limit=limit_bytes
    )


def chart_tuning(report: FitReport) -> doc.Chart:
    """Each trial of tuning that left the headroom, and the best of those so far."""
    by_memory, usable_bytes = report.question.objective == "memory", report.question.usable_bytes or math.inf
    measured: dict[int, float] = {}
    for record in report.trials:
        fit = record.outcome
        if record.trial.purpose == "tune" and isinstance(fit, Fit) and has_headroom(record, usable_bytes):
            measured[record.id] = float(fit.device_peak_bytes) if by_memory else fit.samples_per_second
    best = dict(zip(measured, itertools.accumulate(measured.values(), min if by_memory else max), strict=True))
    return doc.Chart(
        title=f"Tuning: {'device memory' if by_memory else 'samples/s'} by trial",
        lines={"best so far": best, "trial": measured},
        limit=report.question.device_bytes if by_memory else None,
        format_value=format_bytes if by_memory else format_rate,
        x_name="trial",
        logarithmic=False,
        dots="trial",
    )


def describe_communication(report: FitReport) -> Iterator[tuple[str, Words]]:
    """A line for each rung: the bytes that a rank sends in an optimizer step, and their share of its time.

    The trial of a rung is the fastest one with timed collectives, or else the fastest.
    """
    sending = [
        (record.trial.rung, fit, fit.communication)
        for record in report.trials
        if isinstance(fit := record.outcome, Fit) and fit.communication and fit.communication.sent_bytes
    ]
    sending.sort(key=lambda row: (row[2].share is not None, row[1].samples_per_second))
    fits = {rung: (fit, communication) for rung, fit, communication in sending}
    for rung, (fit, communication) in sort_by_ladder(report, fits).items():
        share, sent = communication.share, communication.sent_bytes
        of_step = f", {share:.0%} of a step where nothing overlaps" if share is not None else ""
        ops = sorted(communication.ops.items(), key=lambda item: -item[1].sent_bytes)
        parts = ", ".join(
            f"{name} {format_bytes(op.sent_bytes)} in {format_number_of(op.calls, 'call')}"
            for name, op in ops
            if op.sent_bytes >= _LEAST_SHARE * sent
        )
        samples = format_number_of(round(fit.samples_per_second * statistics.median(fit.step_s)), "sample")
        yield rung, line(f"sends {format_bytes(sent)}{of_step}: {parts}", (f"; a step of {samples}", "dim"))


def sort_by_ladder(report: FitReport, rows: Mapping[str, Row]) -> dict[str, Row]:
    """What belongs to rungs, in the order of the ladder."""
    places = {rung: place for place, rung in enumerate(report.question.ladder)}
    return dict(sorted(rows.items(), key=lambda row: places.get(row[0], len(places))))
