"""The result of a fit on the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..types import TIERS, Collective, Communication, Failed, Fit, OutOfMemory, Record, Tier, TierUse, first_line
from ..units import format_bytes, format_count
from . import text
from .launch import ACCELERATE, DS_CONFIG, DS_CONFIG_HF, launch_lines
from .live import mark_of
from .results import Report
from .serialize import REPORT
from .text import pairs_grid

_MIB = 2**20
_ROOM = 1.05  # a trial's peak varies a little from run to run


def shortage(report: Report) -> str:
    """'zero3-nvme comes closest, at least 61.2 MiB of device memory are missing'."""
    closest = report.closest
    if closest is None:
        failed = any(isinstance(record.outcome, Failed) for record in report.trials)
        return "no rung could be run to its end" if failed else "no rung could be tried"
    missing = closest.get("missing_bytes")
    if missing is None:
        return f"{closest['rung']} comes closest"
    bound = "" if closest.get("exact") else "at least "
    return f"{closest['rung']} comes closest, {bound}{format_bytes(missing)} of {_tier(closest)} memory are missing"


def remedies(report: Report) -> Iterator[str]:
    """Sentences, the surest first."""
    yield from dict.fromkeys(
        f"{record.trial.rung} ran out of {record.outcome.tier} memory: {first_line(record.outcome.advice)}"
        for record in report.trials
        if isinstance(record.outcome, OutOfMemory) and record.outcome.tier != "device" and record.outcome.advice
    )
    if report.closest is None:
        yield from dict.fromkeys(
            f"{record.trial.rung}: {first_line(record.outcome.advice)}"
            for record in report.trials
            if isinstance(record.outcome, Failed) and record.outcome.advice
        )
    elif (missing := report.closest.get("missing_bytes")) is not None:
        yield _more_memory(report, report.closest, int(missing))
    else:
        yield "more memory per rank (--gpu-memory)"
    for skipped in report.skipped:
        if "nvme" in skipped.reason.lower():
            yield f"--nvme-path DIR on a fast disk: {skipped.rung} was skipped for want of it"
    gpus = int(report.question.get("gpus", 1))
    yield f"more ranks (--gpus {gpus * 2}): ZeRO splits the model over them"
    yield "a smaller workload: a shorter sequence in build_batch, or a smaller model"


def _more_memory(report: Report, closest: Mapping[str, Any], missing: int) -> str:
    limit = report.question.get("device_bytes")
    if _tier(closest) != "device" or not isinstance(limit, int):
        return f"{format_bytes(missing)} more {_tier(closest)} memory"
    enough = -(-int((limit + missing) * _ROOM) // (16 * _MIB)) * 16
    size = f"{enough}MiB" if enough < 10240 else f"{-(-enough // 1024)}GiB"
    if report.question.get("device") == "cuda":
        return f"a card with {size} or more for each rank (--gpu-memory {size})"
    known = "" if closest.get("exact") else ", or more: the shortage is a lower bound"
    return f"--gpu-memory {size}{known}"


def _tier(closest: Mapping[str, Any]) -> str:
    return str(closest.get("tier", "device"))


_LEAST = 0.01  # share of the bytes from which a collective is named


def communication_lines(report: Report) -> Iterator[tuple[str, Text]]:
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


def _order(record: Record) -> tuple[bool, float]:
    """The last is the most telling."""
    fit = record.outcome
    if not isinstance(fit, Fit) or fit.communication is None:
        return False, 0.0
    return fit.communication.share is not None, fit.samples_per_second


def _sum(said: Communication) -> str:
    share = f", {said.share:.0%} of a step where nothing overlaps" if said.share is not None else ""
    named = {name: op for name, op in said.ops.items() if op.sent_bytes >= _LEAST * said.sent_bytes}
    parts = ", ".join(_op(name, op) for name, op in sorted(named.items(), key=lambda item: -item[1].sent_bytes))
    return f"sends {format_bytes(said.sent_bytes)}{share}: {parts}"


def _op(name: str, op: Collective) -> str:
    return f"{name} {format_bytes(op.sent_bytes)} in {_counted(op.calls, 'call')}"


def _counted(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


Certificate = Mapping[str, Any]  # "certificate" of report.json, see `tuner.certificate.Certificate`


def headline(certificate: Certificate) -> Text:
    """'Certificate: passed'."""
    if certificate.get("passed"):
        return Text.assemble(("\nCertificate: ", "bold"), ("passed", "bold green"))
    failed = bool(certificate.get("failures"))
    said = "not passed" if failed else "incomplete, what was checked holds"
    return Text.assemble(("\nCertificate: ", "bold"), (said, "bold red" if failed else "bold yellow"))


def certificate_lines(certificate: Certificate) -> Iterator[tuple[str, Text]]:
    """Names and what is said of them; a part that was never reached is left out."""
    if shape := certificate.get("batch_shape"):
        yield "longest batch", Text(_batch(shape, certificate.get("draws") or 0))
    if steps := certificate.get("optimizer_steps"):
        yield "steps", Text(_steps(steps, certificate.get("alloc_retries")))
    if certificate.get("evaluated"):
        yield "evaluation", Text("fits")
    if checkpoint := certificate.get("checkpoint"):
        yield "checkpoint", Text(", ".join(_checkpoint(checkpoint)))
    if headroom := certificate.get("headroom_bytes"):
        yield "headroom", Text(_headroom(headroom, certificate.get("headroom_kept")))
    if parity := certificate.get("parity"):
        yield "parity", Text(_parity(parity), style="" if parity["within"] else "red")
    for name, key, style in (
        ("backed off", "backed_off", "yellow"),
        ("failed", "failures", "red"),
        ("not checked", "not_checked", "yellow"),
    ):
        for number, sentence in enumerate(certificate.get(key) or ()):
            yield "" if number else name, Text(sentence, style=style)


def _batch(shape: tuple[int, ...], draws: int) -> str:
    sizes = " × ".join(f"{size:,}" for size in shape)
    return (
        f"{sizes}, the longest of {draws:,} draws" if draws else f"{sizes}, by the workload's own build_longest_batch"
    )


def _steps(steps: int, retries: int | None) -> str:
    said = f"{steps} optimizer step{'s' if steps > 1 else ''}"
    if retries is None:
        return said
    return f"{said}, the allocator ran full {retries} times" if retries else f"{said} without an allocation retry"


def _checkpoint(checkpoint: Mapping[str, Any]) -> Iterator[str]:
    size, save_s, load_s = checkpoint.get("bytes"), checkpoint.get("save_s"), checkpoint.get("load_s")
    saved = "saved" if size is None else f"{format_bytes(size)} saved"
    yield saved if save_s is None else f"{saved} in {text.format_seconds(save_s)}"
    if load_s is not None:
        yield f"loaded in {text.format_seconds(load_s)}"
    if (restored := checkpoint.get("restored")) is not None:
        yield "evaluates to the same loss" if restored else "evaluates to another loss"
    if (gathered := checkpoint.get("gathered")) is not None:
        yield "whole weights gathered" if gathered else "whole weights not gathered"


def _headroom(headroom: Mapping[str, int], kept: bool | None) -> str:
    free = ", ".join(f"{tier} {format_bytes(headroom[tier])}" for tier in TIERS if tier in headroom)
    return f"{free} (less than the share of the device that the search leaves free)" if kept is False else free


def _parity(parity: Mapping[str, Any]) -> str:
    apart, reference, steps = parity.get("largest_difference"), parity["reference"], parity["steps"]
    over = f"over {steps} step{'s' if steps != 1 else ''}, tolerance {_share(parity['tolerance'])}"
    if apart is None or apart == float("inf"):  # JSON has no infinity
        said = f"a loss is not finite where {reference}'s is, {over}"
    elif parity["within"]:
        said = f"losses within {_share(apart)} of {reference}'s {over}"
    else:
        said = f"losses differ by {_share(apart)} from {reference}'s {over}"
    changed, taken_back = ", ".join(parity.get("changed_by") or ()), parity.get("taken_back")
    if taken_back:
        return f"{said}, since {taken_back}, which changed them, was taken back"
    return f"{said}; changed by {changed}" if changed else said


def _share(value: float) -> str:
    """0.0041 → '0.41 %'."""
    return f"{text.format_rate(100 * value)} %" if value else "0 %"


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
    """Which of two trials of one rung stands for it: the one with the winning knobs, else the fastest fit, else
    the later one."""
    if not isinstance(before, Record):
        return record
    for one in (before, record):
        if one.trial.rung == report.rung and one.trial.knobs == report.knobs:
            return one
    if not isinstance(before.outcome, Fit):
        return record
    usual = isinstance(record.outcome, Fit) and record.trial.exam is None
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
            return Text.assemble((f"{row.outcome.tier:<8}", "dim"), f"full: {format_bytes(limit)}")
        case _:
            return Text()


def _use(tier: Tier, use: TierUse, *, sign: str = " ") -> Text:
    """sign: ≥ for a lower bound, ~ for a forecast."""
    return Text.assemble((f"{tier:<7}", "dim"), sign, text.format_use(use))


def _rate(report: Report, row: Record | str, winner: bool) -> Text:
    if winner and report.throughput:
        return Text(text.format_rate(report.throughput.samples_per_second), style="bold")
    if isinstance(row, str) or not isinstance(row.outcome, Fit):
        return Text()
    return Text(text.format_rate(row.outcome.samples_per_second))


def reasons_of(report: Report) -> Iterator[tuple[str, str]]:
    """Each rung's reason: the search's own words, else what its trial said."""
    for rung, row in rows_of(report).items():
        said = row if isinstance(row, str) else text.format_outcome(row.outcome)
        yield rung, report.reasons.get(rung, said)


def variants_of(report: Report) -> Iterator[tuple[str, str]]:
    """Rungs that also raced with something unusual, such as without checkpointing, and what came of it."""
    rungs = report.question.get("ladder", ())
    for name, reason in report.reasons.items():
        if name not in rungs and name.partition(" ")[0] in rungs:
            yield name, reason


_MOST_SHARES = 3  # keys whose importance is shown
_WIDE = 116  # columns from which the reasons stand in the table instead of under it


def print_fit(report: Report, console: Console) -> None:
    """Print the report. Reads nothing but the report, so a finished fit can be shown again."""
    wide = console.width >= _WIDE
    console.print(Text.assemble("\n", (_question(report), "bold")))
    console.print(ladder_table(report, wide=wide))
    for reason, rungs in untried(report).items():
        console.print(Text(f"  {reason}: {', '.join(rungs)}\n", style="dim"))
    if not wide:
        console.print(pairs_grid((rung, Text(reason)) for rung, reason in reasons_of(report)))
        console.print()
    if variants := list(variants_of(report)):
        console.print(pairs_grid((name, Text(reason)) for name, reason in variants))
        console.print()
    if spent := list(communication_lines(report)):
        console.print(Text("communication of a rank in an optimizer step", style="bold"))
        console.print(pairs_grid(spent))
        console.print()
    if report.status == "nothing_fits":
        console.print(_nothing(report))
        return
    console.print(_winner(report))
    for line in _next(report):
        console.print(line, soft_wrap=True)


def _question(report: Report) -> str:
    """'gpt, 32.6M parameters, on 2 cpu ranks × 416.0 MiB'; what the question does not say is left out."""
    asked = report.question
    size = f", {format_count(asked['parameters'])} parameters," if asked.get("parameters") else ""
    memory = f" × {format_bytes(asked['device_bytes'])}" if asked.get("device_bytes") else ""
    if asked.get("pipeline_stages"):
        size = f"{size} a pipeline of {asked['pipeline_stages']} stages,"
    if asked.get("experts"):
        size = f"{size} {asked['experts']} experts,"
    return (
        f"{asked.get('workload', 'workload')}{size} on "
        f"{text.format_ranks(asked.get('gpus', 1), asked.get('device', ''))}{memory}"
    )


def _winner(report: Report) -> RenderableType:
    assert report.knobs is not None
    raced = report.question.get("stop") == "fastest"
    how = " is the fastest that fits" if raced else " fits, the first rung of the ladder that does"
    head = Text.assemble((f"{report.rung}", "bold green"), (how, "bold"), _spent(report))
    return Group(head, pairs_grid(_facts(report)), *_certified(report), Text("\nNext", style="bold"))


def _certified(report: Report) -> Iterator[RenderableType]:
    if report.certificate:
        yield headline(report.certificate)
        yield pairs_grid(certificate_lines(report.certificate))


def _spent(report: Report) -> Text:
    return Text(f"  ({len(report.trials)} trials, {text.format_seconds(report.seconds)})", style="dim")


def _facts(report: Report) -> Iterator[tuple[str, RenderableType]]:
    """The winner, fact by fact."""
    assert report.knobs is not None
    yield (
        "batch",
        Text(report.reasons.get("batch") or text.format_batch(report.knobs, int(report.question.get("gpus", 1)))),
    )
    if report.throughput:
        tokens = report.throughput.tokens_per_second
        rate = f"{text.format_rate(report.throughput.samples_per_second)} samples/s"
        yield "throughput", Text(rate + (f", {text.format_rate(tokens)} tokens/s" if tokens is not None else ""))
    if report.largest_micro_batch is not None and report.largest_micro_batch != report.knobs.micro_batch:
        yield "largest", Text(f"micro batch {report.largest_micro_batch} also fits")
    recomputes = report.knobs.checkpointing
    yield "recompute", Text("gradient checkpointing on" if recomputes else "gradient checkpointing off")
    settings = (f"{key.rpartition('.')[2]} {_show(value)}" for key, value in report.knobs.settings.items())
    if tuned := ", ".join(settings):
        yield "settings", Text(tuned)
    for act in ("grow", "tune"):
        if reason := report.reasons.get(act):
            yield act, Text(reason, style="dim")
    if shares := sorted(report.importances.items(), key=lambda item: -item[1])[:_MOST_SHARES]:
        said = ", ".join(f"{key.rpartition('.')[2]} {share:.0%}" for key, share in shares)
        yield "mattered", Text(f"{said} of the variation in tuning", style="dim")


def _next(report: Report) -> Iterator[Text]:
    """What to type now: whole lines, so that they can be copied."""
    for name, said in launch_lines(report):
        yield _line(name, said)
    yield _line("files", f"{DS_CONFIG}, {DS_CONFIG_HF}, {ACCELERATE} and {REPORT} in {Path(report.out)}")


def _line(name: str, said: str) -> Text:
    return Text.assemble((f"  {name:<10}  ", "cyan"), said)


def _nothing(report: Report) -> RenderableType:
    head = Text.assemble(("nothing fits: ", "bold red"), (shortage(report), "bold"), _spent(report))
    return Group(head, pairs_grid((f"{n}.", Text(remedy)) for n, remedy in enumerate(remedies(report), 1)))


def _show(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else str(value)
