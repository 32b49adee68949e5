"""The result of a fit on the terminal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..config.settings import KEPT_BY_KERNEL, KEPT_BY_PYTHON
from ..types import TIERS, Failed, Fit, Outcome, OutOfMemory, Record, Scalar, Tier, TierUse, first_line
from ..units import format_bytes, format_count
from .launch import ACCELERATE, DS_CONFIG, DS_CONFIG_HF, DS_CONFIG_REHEARSED, launch_lines
from .results.fit import Certificate, CheckpointProof, ClosestRung, FitReport, Parity
from .serialize import REPORT
from .text import (
    MARKS,
    TIER_NAMES,
    WIDE_FIT,
    format_batch,
    format_number_of,
    format_outcome,
    format_ranks,
    format_rate,
    format_seconds,
    format_share,
    format_use,
    pairs_grid,
    plain_table,
)

_MIB = 2**20
_PEAK_VARIATION = 1.05  # a trial's peak varies a little from run to run
_LEAST_SHARE = 0.01  # of the bytes sent, from which a collective is named
_MOST_IMPORTANCES = 3
Row = TypeVar("Row")


def print_fit(report: FitReport, console: Console, *, verbose: bool = False) -> None:
    """Print the answer and the ladder, and with `verbose` also why, the certificate and all ways to launch.

    It needs nothing but the report, so a finished fit can be shown again.
    """
    console.print(Text.assemble("\n", (describe_question(report), "bold")))
    _print_answer(report, console)
    console.print()
    _print_ladder(report, console, verbose=verbose)
    if report.status == "nothing_fits":
        return
    if not verbose:
        more = f"-v shows the reasons, the certificate and more launchers, {Path(report.out) / REPORT} has all of it"
        console.print(Text(more, style="dim"), soft_wrap=True)
        return
    console.print(pairs_grid(_winner_facts(report)))
    if report.certificate is not None:
        console.print(certificate_headline(report.certificate))
        console.print(pairs_grid(certificate_lines(report.certificate)))
    console.print(Text("\nNext", style="bold"))
    configs = f"{DS_CONFIG}, {DS_CONFIG_HF}, {ACCELERATE}"
    if report.question.rehearsed_on is not None:
        configs = DS_CONFIG_REHEARSED
    files = f"{configs} and {REPORT} in {Path(report.out)}"
    for name, command in (*launch_lines(report), ("files", files)):  # on whole lines, so that they can be copied
        console.print(Text.assemble((f"  {name:<10}  ", "cyan"), command), soft_wrap=True)


def _print_answer(report: FitReport, console: Console) -> None:
    """Four lines: the config, its speed, its memory, and how to use it; or what is missing."""
    effort = (f"  ({describe_effort(report)})", "dim")
    if report.status == "nothing_fits":
        console.print(Text.assemble(("nothing fits: ", "bold red"), (describe_shortage(report), "bold"), effort))
        console.print(pairs_grid((f"{n}.", Text(remedy)) for n, remedy in enumerate(remedies(report), 1)))
        return
    console.print(Text.assemble((f"{report.rung}", "bold green"), (f" {describe_claim(report)}", "bold"), effort))
    console.print(pairs_grid(answer_rows(report)))
    _, command = next((line for line in launch_lines(report) if line[0] in ("launch", "or")), ("", ""))
    console.print(Text.assemble(("  use it  ", "cyan"), command), soft_wrap=True)  # a whole line, to be copied


def describe_effort(report: FitReport) -> str:
    """'12 trials, 4 min'; of a rehearsal also that it proves nothing, and what a real fit would take."""
    effort = f"{len(report.trials)} trials, {format_seconds(report.seconds)}"
    if report.question.rehearsed_on is None:
        return effort
    effort += ", not proven: a rehearsal"
    if report.real_fit_seconds is None:
        return effort
    return f"{effort}; a real fit and its certificate would take about {format_seconds(report.real_fit_seconds)}"


def describe_claim(report: FitReport) -> str:
    """What the fit says of its rung: it is the fastest, or the first that fits where the others were not raced."""
    raced = report.question.stop == "fastest"
    if report.question.rehearsed_on is not None:
        claim = "would be the fastest that fits" if raced else "would fit, the first rung tried that does"
        return f"{claim} on {report.question.rehearsed_on}, by a rehearsal"
    return "is the fastest that fits" if raced else "fits, the first rung tried that does"


def answer_rows(report: FitReport) -> list[tuple[str, Text]]:
    """The config that fits, its speed, its memory and its proof, each with a name."""
    assert report.knobs is not None
    checkpointing = "gradient checkpointing" if report.knobs.checkpointing else "no gradient checkpointing"
    sizes = f"micro batch {report.knobs.micro_batch} × accumulation {report.knobs.accumulation}"
    rows = [("config", Text(f"{sizes}, {checkpointing}"))]
    if report.throughput is not None:
        rows.append(("speed", Text(_describe_speed(report))))
    if report.memory:
        uses = [f"{TIER_NAMES[tier]} {format_use(report.memory[tier])}" for tier in TIERS if tier in report.memory]
        rows.append(("memory", Text(", ".join(uses))))
    if report.question.rehearsed_on is not None:
        rows.append(("proof", Text("not proven: a rehearsal, nothing ran", style="yellow")))
    elif report.certificate is not None:
        rows.append(("proof", _describe_proof(report.certificate)))
    return rows


def _describe_speed(report: FitReport) -> str:
    """'9.73 samples/s, 623 tokens/s: 4.94 × the first rung that fitted (zero3, micro batch 1)'."""
    assert report.throughput is not None
    rate, tokens = report.throughput.samples_per_second, report.throughput.tokens_per_second
    text = f"{format_rate(rate)} samples/s" + (f", {format_rate(tokens)} tokens/s" if tokens is not None else "")
    for record in report.trials:
        fit = record.outcome
        if record.trial.purpose == "walk" and isinstance(fit, Fit):
            first = f"{record.trial.rung}, micro batch {record.trial.knobs.micro_batch}"
            return f"{text}: {rate / fit.samples_per_second:.3g} × the first that fitted ({first})"
    return text


def _describe_proof(certificate: Certificate) -> Text:
    """'certificate passed', or the first thing that failed or was not checked."""
    if certificate.passed:
        return Text("certificate passed", style="green")
    if certificate.failures:
        return Text(f"certificate not passed: {certificate.failures[0]}", style="red")
    return Text(f"certificate incomplete: {', '.join(certificate.not_checked[:1])}", style="yellow")


def _print_ladder(report: FitReport, console: Console, *, verbose: bool) -> None:
    """The table of rungs. With `verbose` the reasons for each, for the variants that raced, and the communication."""
    wide = console.width >= WIDE_FIT
    console.print(ladder_table(report, wide=wide))
    reasons = _reasons(report)
    untried = {
        rung: report.reasons[rung] for rung in report.question.ladder if rung in report.reasons.keys() - reasons.keys()
    }
    for reason in dict.fromkeys(untried.values()):
        rungs = ", ".join(rung for rung in untried if untried[rung] == reason)
        console.print(Padding(Text(f"{reason}: {rungs}", style="dim"), (0, 0, 1, 2)))
    # Variants of rungs raced too, such as 'zero2 without checkpointing'.
    names = [
        name
        for name in report.reasons
        if name not in report.question.ladder and name.partition(" ")[0] in report.question.ladder
    ]
    if not verbose and report.status == "fit":  # out of memory needs no words; a failure does
        failed = {rung for rung, row in ladder_rows(report).items() if _has_failed(row)}
        reasons = {rung: reason for rung, reason in reasons.items() if rung in failed}
    for title, pairs in (
        ("", [] if wide else [(rung, Text(reason)) for rung, reason in reasons.items()]),
        ("", [(name, Text(report.reasons[name])) for name in names] if verbose else []),
        ("communication of a rank in an optimizer step", list(communication_lines(report)) if verbose else []),
    ):
        if pairs:
            if title:
                console.print(Text(title, style="bold"))
            console.print(pairs_grid(pairs))
            console.print()


def describe_question(report: FitReport) -> str:
    """'gpt, 32.6M parameters, on 2 cpu ranks × 416.0 MiB'; unknown parts are left out."""
    question = report.question
    facts = [f"{format_count(question.parameters)} parameters"] if question.parameters else []
    if question.pipeline_stages:
        facts.append(f"a pipeline of {question.pipeline_stages} stages")
    if question.experts:
        facts.append(f"{question.experts} experts")
    workload = ", ".join((question.workload, *facts)) + ("," if facts else "")
    memory = f" × {format_bytes(question.device_bytes)}" if question.device_bytes else ""
    return f"{workload} on {format_ranks(question.gpus, question.device)}{memory}"


# The ladder.


def ladder_table(report: FitReport, *, wide: bool) -> Table:
    """A row a rung: its outcome, memory and speed, and in a `wide` table the reason."""
    table = plain_table(expand=wide)
    table.add_column("rung", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    table.add_column("peak / limit", no_wrap=True)
    table.add_column("samples/s", justify="right", no_wrap=True)
    if wide:
        table.add_column("why", ratio=1)
    on_trial = {record.trial.rung for record in report.trials}
    refused = {
        forecast.rung: forecast.memory["device"]
        for forecast in report.forecast
        if forecast.verdict == "cannot_fit" and "device" in forecast.memory
    }
    reasons = _reasons(report)
    for rung, row in ladder_rows(report).items():
        winner = report.status == "fit" and rung == report.rung
        memory, rate = Text(), Text()
        if rung in refused and rung not in on_trial:
            mark, device = MARKS["cannot_fit"], refused[rung]
            use = TierUse(peak_bytes=device.peak_bytes, limit_bytes=device.limit_bytes)
            memory = _memory_line("device", use, sign="~")
        elif isinstance(row, str):
            mark = MARKS["skipped"]
        else:
            mark, memory = MARKS[row.outcome.kind], _memory(report, row.outcome, winner)
            if winner and report.throughput:
                rate = Text(format_rate(report.throughput.samples_per_second), style="bold")
            elif isinstance(row.outcome, Fit):
                rate = Text(format_rate(row.outcome.samples_per_second))
        cells = (Text(rung, style="bold" if winner else ""), mark.text(), memory, rate, Text(reasons.get(rung, "")))
        table.add_row(*cells[: len(table.columns)])
    return table


def ladder_rows(report: FitReport) -> dict[str, Record | str]:
    """Return the most telling trial of each rung, or why it was skipped, in the ladder's order."""

    def order(record: Record) -> tuple[bool, bool, float]:
        """The most telling last: the winning knobs, else the fastest fit that is no exam, else the later trial."""
        wins = record.trial.rung == report.rung and record.trial.knobs == report.knobs
        if not isinstance(record.outcome, Fit):
            return wins, False, 0.0
        return wins, True, record.outcome.samples_per_second if record.trial.exam is None else 0.0

    rows: dict[str, Record | str] = {skipped.rung: skipped.reason for skipped in report.skipped}
    limited = [record for record in report.trials if record.trial.limited]  # others only measure what would be enough
    rows |= {record.trial.rung: record for record in sorted(limited, key=order)}
    return _in_ladder_order(report, rows)


def _in_ladder_order(report: FitReport, rows: Mapping[str, Row]) -> dict[str, Row]:
    places = {rung: place for place, rung in enumerate(report.question.ladder)}
    return dict(sorted(rows.items(), key=lambda row: places.get(row[0], len(places))))


def _has_failed(row: Record | str) -> bool:
    return isinstance(row, Record) and isinstance(row.outcome, Failed)


def _memory(report: FitReport, outcome: Outcome, winner: bool) -> Text:
    """One line a tier. A rung that ran out shows the least that it would have needed."""
    match outcome:
        case Fit():
            memory = report.memory if winner and report.memory else outcome.memory
            return Text("\n").join(_memory_line(tier, memory[tier]) for tier in TIERS if tier in memory)
        case OutOfMemory(tier=tier, limit_bytes=int(limit), missing_bytes=int(missing)):
            return _memory_line(tier, TierUse(peak_bytes=limit + missing, limit_bytes=limit), sign="≥")
        case OutOfMemory(tier=tier, limit_bytes=int(limit)):
            return Text.assemble((f"{tier:<8}", "dim"), f"full: {format_bytes(limit)}")
        case _:
            return Text()


def _memory_line(tier: Tier, use: TierUse, *, sign: str = " ") -> Text:
    """Format one tier's memory. `sign` is ≥ for a lower bound and ~ for a forecast."""
    return Text.assemble((f"{tier:<7}", "dim"), sign, format_use(use))


def _reasons(report: FitReport) -> dict[str, str]:
    """Each rung with the search's reason for it, else with the outcome of its trial."""
    return {
        rung: report.reasons.get(rung) or (row if isinstance(row, str) else format_outcome(row.outcome))
        for rung, row in ladder_rows(report).items()
    }


# Communication.


def communication_lines(report: FitReport) -> Iterator[tuple[str, Text]]:
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
    for rung, (fit, communication) in _in_ladder_order(report, fits).items():
        share, sent = communication.share, communication.sent_bytes
        of_step = f", {share:.0%} of a step where nothing overlaps" if share is not None else ""
        ops = sorted(communication.ops.items(), key=lambda item: -item[1].sent_bytes)
        parts = ", ".join(
            f"{name} {format_bytes(op.sent_bytes)} in {format_number_of(op.calls, 'call')}"
            for name, op in ops
            if op.sent_bytes >= _LEAST_SHARE * sent
        )
        samples = format_number_of(round(fit.samples_per_second * statistics.median(fit.step_s)), "sample")
        yield rung, Text.assemble(f"sends {format_bytes(sent)}{of_step}: {parts}", (f"; a step of {samples}", "dim"))


# The winner.


def _winner_facts(report: FitReport) -> Iterator[tuple[str, RenderableType]]:
    assert report.knobs is not None
    yield "batch", Text(report.reasons.get("batch") or format_batch(report.knobs, report.question.gpus))
    if report.throughput:
        tokens = report.throughput.tokens_per_second
        rate = f"{format_rate(report.throughput.samples_per_second)} samples/s"
        yield "throughput", Text(rate + (f", {format_rate(tokens)} tokens/s" if tokens is not None else ""))
    if report.largest_micro_batch is not None and report.largest_micro_batch != report.knobs.micro_batch:
        yield "largest", Text(f"micro batch {report.largest_micro_batch} also fits")
    yield "recompute", Text(f"gradient checkpointing {'on' if report.knobs.checkpointing else 'off'}")
    settings = (f"{key.rpartition('.')[2]} {_setting(value)}" for key, value in report.knobs.settings.items())
    if line := ", ".join(settings):
        yield "settings", Text(line)
    for step in ("grow", "tune"):
        if reason := report.reasons.get(step):
            yield step, Text(reason, style="dim")
    if shares := sorted(report.importances.items(), key=lambda item: -item[1])[:_MOST_IMPORTANCES]:
        line = ", ".join(f"{key.rpartition('.')[2]} {share:.0%}" for key, share in shares)
        yield "mattered", Text(f"{line} of the variation in tuning", style="dim")
    if report.question.writes_confined is not None:
        yield "your files", Text(KEPT_BY_KERNEL if report.question.writes_confined else KEPT_BY_PYTHON, style="dim")


def _setting(value: Scalar) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else str(value)


# The certificate.


def certificate_headline(certificate: Certificate) -> Text:
    """'Certificate: passed'."""
    verdict = ("incomplete, what was checked holds", "bold yellow")
    if certificate.passed:
        verdict = ("passed", "bold green")
    elif certificate.failures:
        verdict = ("not passed", "bold red")
    return Text.assemble(("\nCertificate: ", "bold"), verdict)


def certificate_lines(certificate: Certificate) -> Iterator[tuple[str, Text]]:
    """The checks by name, each with its result; a check that was never reached is left out."""
    if shape := certificate.batch_shape:
        draws = certificate.draws
        origin = f"the longest of {draws:,} draws" if draws else "by the workload's own build_longest_batch"
        yield "longest batch", Text(f"{' × '.join(f'{size:,}' for size in shape)}, {origin}")
    if steps := certificate.optimizer_steps:
        retries = certificate.alloc_retries
        full = f", the allocator ran full {retries} times" if retries else " without an allocation retry"
        level = ", memory does not grow" if certificate.growth_bytes == 0 else ""
        skips = f", {certificate.skipped_steps} more skipped as fp16 overflowed" if certificate.skipped_steps else ""
        yield (
            "steps",
            Text(format_number_of(steps, "optimizer step") + ("" if retries is None else full) + level + skips),
        )
    if certificate.evaluated:
        yield "evaluation", Text("fits")
    if checkpoint := certificate.checkpoint:
        yield "checkpoint", Text(", ".join(_checkpoint(checkpoint)))
    if headroom := certificate.headroom_bytes:
        free = ", ".join(f"{tier} {format_bytes(headroom[tier])}" for tier in TIERS if tier in headroom)
        small = " (less than the share of the device that the search leaves free)"
        yield "headroom", Text(free + (small if certificate.headroom_kept is False else ""))
    if parity := certificate.parity:
        yield "parity", Text(_parity(parity), style="" if parity.within else "red")
    for name, sentences, style in (
        ("backed off", certificate.backed_off, "yellow"),
        ("failed", certificate.failures, "red"),
        ("not checked", certificate.not_checked, "yellow"),
    ):
        for number, sentence in enumerate(sentences):
            yield "" if number else name, Text(sentence, style=style)


def _checkpoint(checkpoint: CheckpointProof) -> Iterator[str]:
    size, save_s, load_s = checkpoint.bytes, checkpoint.save_s, checkpoint.load_s
    saved = "saved" if size is None else f"{format_bytes(size)} saved"
    yield saved if save_s is None else f"{saved} in {format_seconds(save_s)}"
    if load_s is not None:
        yield f"loaded in {format_seconds(load_s)}"
    if (restored := checkpoint.restored) is not None:
        yield f"evaluates to {'the same' if restored else 'another'} loss"
    if (gathered := checkpoint.gathered) is not None:
        yield f"whole weights {'' if gathered else 'not '}gathered"


def _parity(parity: Parity) -> str:
    difference, reference = parity.largest_difference, parity.reference
    if math.isinf(difference):
        result = f"a loss is not finite where {reference}'s is,"
    else:
        result = f"losses {_apart(difference, parity.tolerance)} {reference}'s"
    result += f" over {format_number_of(parity.steps, 'step')}, tolerance {format_share(parity.tolerance)}"
    if (apart := parity.update_difference) is not None and (tolerance := parity.update_tolerance) is not None:
        result += f"; updates {_apart(apart, tolerance)} {reference}'s, tolerance {format_share(tolerance)}"
    if parity.taken_back:
        return f"{result}, since {parity.taken_back}, which changed them, was taken back"
    return f"{result}; changed by {', '.join(parity.changed_by)}" if parity.changed_by else result


def _apart(difference: float, tolerance: float) -> str:
    """'within 0.2 % of' or 'differ by 3 % from'."""
    share = format_share(difference)
    return f"within {share} of" if difference <= tolerance else f"differ by {share} from"


# Nothing fits.


def describe_shortage(report: FitReport) -> str:
    """'zero3-nvme comes closest, at least 61.2 MiB of device memory are missing'."""
    closest = report.closest
    if closest is None:
        failed = any(isinstance(record.outcome, Failed) for record in report.trials)
        return f"no rung could be {'run to its end' if failed else 'tried'}"
    if closest.missing_bytes is None:
        return f"{closest.rung} comes closest"
    missing = f"{'' if closest.exact else 'at least '}{format_bytes(closest.missing_bytes)} of {closest.tier} memory"
    return f"{closest.rung} comes closest, {missing} are missing"


def remedies(report: FitReport) -> Iterator[str]:
    """Ways to make something fit, the surest first."""
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
    elif report.closest.missing_bytes is not None:
        yield _more_memory(report, report.closest, report.closest.missing_bytes)
    else:
        yield "more memory per rank (--gpu-memory)"
    for rung in report.question.lacks_nvme:
        yield f"--nvme-path DIR on a fast disk: {rung} was skipped because it needs one"
    yield f"more ranks (--gpus {report.question.gpus * 2}): ZeRO splits the model over them"
    yield "a smaller workload: a shorter sequence in build_batch, or a smaller model"


def _more_memory(report: FitReport, closest: ClosestRung, missing: int) -> str:
    limit = report.question.device_bytes
    if closest.tier != "device" or limit is None:
        return f"{format_bytes(missing)} more {closest.tier} memory"
    enough_mib = -(-int((limit + missing) * _PEAK_VARIATION) // (16 * _MIB)) * 16
    size = f"{enough_mib}MiB" if enough_mib < 10240 else f"{-(-enough_mib // 1024)}GiB"
    if report.device.has_cards:
        return f"a card with {size} or more for each rank (--gpu-memory {size})"
    bound = "" if closest.exact else ", or more: the shortage is a lower bound"
    return f"--gpu-memory {size}{bound}"
