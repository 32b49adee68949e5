"""The document of `autods fit`: the answer, the ladder, why it came so, and every trial."""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...config.checkpointing import describe_state
from ...config.settings import KEPT_BY_KERNEL, KEPT_BY_PYTHON
from ...config.trainers import DS_CONFIG, DS_CONFIG_HF
from ...types import Fit, Knobs, Trial
from ...units import format_bytes, format_count, format_factor
from .. import document as doc
from ..document import Column, Medium, Words, line, make_document, tabulate, titled
from ..launch import ACCELERATE, DS_CONFIG_REHEARSED, launch_lines
from ..results.fit import FitReport
from ..results.measured import Measured, find_measured
from ..serialize import REPORT
from ..text import (
    MARKS,
    TIER_NAMES,
    format_batch,
    format_number_of,
    format_ranks,
    format_rate,
    format_seconds,
    format_use,
    format_value,
)
from ..trial_names import unusual_knobs
from .certificate import describe_proof, describe_trust, describe_verdict, list_checks
from .ladder import (
    LADDER,
    NOT_TRIED,
    LadderRow,
    can_recompute,
    describe_failed_exam,
    find_fastest,
    find_usable,
    join_sentences,
    list_ladder,
    list_used_tiers,
    was_backed_off,
)
from .remedies import describe_shortage, describe_way_out, list_remedies
from .trials import chart_trials, chart_tuning, describe_communication, describe_machine, list_trials

_MOST_IMPORTANCES = 3
# Lines of launch that a page folds: one way is enough for most readers.
_OTHER_WAYS = {"or": "another launcher", "Trainer": "the Hugging Face Trainer", "accelerate": "accelerate"}
_OVERRUN = 1.02  # of the time asked, from which a fit says why: less is the end of a last trial
_STEADY = 1.2  # trials of one config differ by less on a machine that does nothing else


# The document.


def make_fit_document(
    report: FitReport, folder: Path | None = None, *, columns: Sequence[Column[LadderRow]] = LADDER
) -> doc.Document:
    """What a fit shows. Its page quotes the logs in `folder`, that of the fit; None leaves them out."""
    return make_document(
        title=report.question.workload,
        question=describe_question(report),
        parts=_list_parts(report, folder, columns),
    )


def make_comparison(reports: Sequence[FitReport]) -> doc.Document:
    """Finished fits side by side: what was asked, the answers and the ladders, for a pull request."""
    facts = [defaultdict[str, Words](str, _list_facts(report)) for report in reports]  # '' where one lacks a fact
    columns: list[Column[str]] = [Column(name="", read=lambda name: name)]
    columns += (Column(name=report.out, read=known.__getitem__) for report, known in zip(reports, facts, strict=True))
    parts: list[doc.Part] = [tabulate(columns, dict.fromkeys(name for known in facts for name in [*known]))]
    for report in reports:
        parts += titled(f"Ladder of {report.out}", tabulate(LADDER, list_ladder(report)))
    return make_document(title="fits", question="", parts=parts)


def _list_facts(report: FitReport) -> Iterator[tuple[str, Words]]:
    """What fits are compared by: the rows of their answers, with what was asked and what it took."""
    yield "asked", describe_question(report)
    yield "answer", _describe_config(report) or f"nothing fits: {describe_shortage(report)}"
    if report.throughput is not None:
        yield "samples/s", format_rate(report.throughput.samples_per_second)
    yield from list_answer(report)
    yield "effort", describe_effort(report)
    yield "versions", ", ".join(f"{name} {version}" for name, version in report.versions.items())


def _list_parts(report: FitReport, folder: Path | None, columns: Sequence[Column[LadderRow]]) -> Iterator[doc.Part]:
    fits, ladder = report.status == "fit", list_ladder(report)
    if fits:
        yield doc.Headline(words=_describe_answer(report), effort=describe_effort(report))
        yield doc.Pairs(items=tuple(list_answer(report)))
        launch = tuple(launch_lines(report))
        lines = [command for name, command in launch if name in ("launch", "or")][:2]
        code = [each for each in launch if each[0] == "code" and report.question.script is not None]  # it needs them
        notes = [each for each in launch if each[0] == "note"]
        use = (*code, *zip(("use it", "or"), lines, strict=False), *notes)
        yield doc.Pairs(items=use, whole=True, on=Medium.TERMINAL)
        first = tuple(each for each in launch if each[0] not in _OTHER_WAYS)
        yield from titled("Train with it", doc.Pairs(items=first, whole=True, on=Medium.PAGE))
        folded = [doc.Detail(summary=_OTHER_WAYS[name], text=text) for name, text in launch if name in _OTHER_WAYS]
        if report.ds_config is not None:
            folded.append(doc.Detail(summary=DS_CONFIG, text=json.dumps(report.ds_config, indent=2)))
        yield doc.Details(items=tuple(folded))
    else:
        answer = line(("nothing fits: ", "bold red"), (describe_shortage(report), "bold"))
        if (way_out := describe_way_out(report.partitioned)) is not None:
            answer = line((way_out, "bold red"))
        yield doc.Headline(words=answer, effort=describe_effort(report))
        yield doc.Bullets(items=tuple(list_remedies(report)), numbered=True)
    for warning in report.warnings:
        yield doc.Paragraph(words=line((f"warning: {warning}", "yellow")), whole=True)
    yield doc.Heading(words="The ladder", on=Medium.PAGE | Medium.MARKDOWN)
    yield doc.Legend(on=Medium.PAGE)
    yield tabulate(columns, ladder, quiet=lambda row: fits and row.mark != MARKS["failed"])
    yield from _explain_others(report, ladder)
    communication = doc.Pairs(items=tuple(describe_communication(report)), on=Medium.DETAILS)
    yield from titled("Communication of a rank in an optimizer step", communication)
    if fits:
        again = f"autods report {shlex.quote(str(Path(report.out)))} -v"
        more = f"{again} shows the reasons, the certificate and more launchers; {REPORT} there has all of it"
        yield doc.Paragraph(words=line((more, "dim")), whole=True, gap=True, on=Medium.BRIEF)
        yield from titled("The winner", doc.Pairs(items=tuple(_list_winner_facts(report)), on=Medium.DETAILS))
    if report.certificate is not None:
        checks = doc.Pairs(items=tuple(list_checks(report.certificate)), on=Medium.DETAILS)
        yield doc.Heading(words=describe_verdict(report.certificate), on=Medium.DETAILS)
        yield checks
    yield from chart_trials(report.trials, report.question.device_bytes, usable_bytes=find_usable(report))
    yield chart_tuning(report)
    if fits:
        configs = f"{DS_CONFIG}, {DS_CONFIG_HF}, {ACCELERATE}"
        if report.question.rehearsed_on is not None:
            configs = DS_CONFIG_REHEARSED
        files = ("files", f"{configs} and {REPORT} in {Path(report.out)}")
        yield from titled("Next", doc.Pairs(items=(*launch, files), whole=True, on=Medium.VERBOSE))
    recomputes, usable_bytes = can_recompute(report), find_usable(report)

    def label(trial: Trial) -> str:
        return unusual_knobs(trial.knobs, recomputes=recomputes)

    yield from titled("Every trial", list_trials(report.trials, folder, label, usable_bytes=usable_bytes))
    yield from titled("Machine and versions", describe_machine(report.hardware, report.versions))


def _explain_others(report: FitReport, ladder: Sequence[LadderRow]) -> Iterator[doc.Part]:
    """Rungs that need no row, by the reason; then the variants of rungs that raced, such as 'zero2 without …'."""
    named, rungs = {row.rung for row in ladder}, report.question.ladder
    untried = {rung: report.reasons[rung] for rung in rungs if rung in report.reasons and rung not in named}
    for number, reason in enumerate(dict.fromkeys(untried.values())):
        names = ", ".join(rung for rung in untried if untried[rung] == reason)
        words = line((f"not tried ({reason.removeprefix(NOT_TRIED)}): {names}", "dim"))
        yield doc.Paragraph(words=words, gap=number == 0, indent=2)
    variants = [name for name in report.reasons if name not in rungs and name.partition(" ")[0] in rungs]
    yield doc.Pairs(items=tuple((name, report.reasons[name]) for name in variants), on=Medium.DETAILS, gap=True)


# What was asked, and the answer.


def describe_question(report: FitReport) -> str:
    """'gpt, 32.6M parameters, on 2 cpu ranks × 416.0 MiB'; unknown parts are left out."""
    question = report.question
    facts = [f"{format_count(question.parameters)} parameters"] if question.parameters else []
    if question.weights:
        facts.append("from its weights")
    if question.lora:
        facts.append(f"LoRA {question.lora}")
    if question.pipeline_stages:
        facts.append(f"a pipeline of {format_number_of(question.pipeline_stages, 'stage')}")
    if question.experts:
        facts.append(format_number_of(question.experts, "expert"))
    workload = ", ".join((question.workload, *facts)) + ("," if facts else "")
    memory = f" × {format_bytes(question.device_bytes)}" if question.device_bytes else ""
    nodes = f" of {question.nodes} nodes" if question.nodes > 1 else ""
    return f"{workload} on {format_ranks(question.gpus, question.device)}{nodes}{memory}"


def describe_effort(report: FitReport) -> str:
    """'12 trials, 4 min'; of a rehearsal also that it proves nothing, and what a real fit would take.

    A fit that took longer than asked says why.
    """
    trials, seconds = format_number_of(len(report.trials), "trial"), report.seconds
    effort = f"{trials}, {format_seconds(seconds)}"
    if report.question.rehearsed_on is not None:
        effort, seconds = f"{effort}, not proven: a rehearsal", report.real_fit_seconds or 0.0
        if seconds:
            effort += f"; a real fit and its certificate would take about {format_seconds(seconds)}"
    asked_s = report.question.budget.seconds
    if 0 < asked_s * _OVERRUN < seconds:
        why = "the exam had to back off" if was_backed_off(report) else "the least that gives an answer takes longer"
        effort += f"; {format_seconds(asked_s)} were asked, and {why}"
    return effort


def _describe_answer(report: FitReport) -> Words:
    """'Use zero3, micro batch 8, gradient checkpointing: 4.05 samples/s. Certified.'"""
    answer = line(("Use ", "bold"), (_describe_config(report), "bold green"))
    if report.question.objective == "memory" and "device" in report.memory:
        answer = line(answer, (f": {format_use(report.memory['device'])} of device memory", "bold"))
    elif report.throughput is not None:
        answer = line(answer, (f": {format_rate(report.throughput.samples_per_second)} samples/s", "bold"))
    return line(answer, ". ", _describe_trust(report))


def _describe_config(report: FitReport) -> str:
    """'zero3, micro batch 8, gradient checkpointing'; '' where nothing fits."""
    if report.knobs is None:
        return ""
    return f"{report.rung}, micro batch {report.knobs.micro_batch}, {describe_state(report.knobs)}"


def _describe_trust(report: FitReport) -> Words:
    """'Certified.', or why one can rely on the answer less."""
    if report.question.rehearsed_on is not None:
        return line(("Not proven: a rehearsal.", "yellow"))
    return line(("Not certified.", "yellow")) if report.certificate is None else describe_trust(report.certificate)


def _describe_claim(report: FitReport) -> str:
    """'the fastest that fits; 2.7 times as fast as the first that fitted (zero3, micro batch 1); next is zero2 …'."""
    raced, on = report.question.stop == "fastest", report.question.rehearsed_on
    claim = "the leanest that fits" if report.question.objective == "memory" else "the fastest that fits"
    if not raced:
        claim = "the first rung that fits; --stop fastest measures the others too"
    elif _find_faster(report) is not None and was_backed_off(report):
        claim = "the fastest that passed the certificate's exam"
    return join_sentences(claim + (f" on {on}" if on else ""), _compare_with_first(report), _name_next(report))


def _compare_with_first(report: FitReport) -> str | None:
    """'2.7 times as fast as the first that fitted (zero3, micro batch 1)'; None where it is that one.

    Its other knobs are named where they are what differs.
    """
    fitted = (record for record in report.trials if record.trial.limited and isinstance(record.outcome, Fit))
    first = next(fitted, None)
    if first is None or report.throughput is None or report.knobs is None:
        return None
    config = find_measured(report.trials, first.trial.rung, first.trial.knobs)
    if config is None or (differing := _name_apart(config.trial, report.rung, report.knobs)) is None:
        return None
    if config == _find_faster(report):  # is named as that
        return None
    times = format_factor(report.throughput.samples_per_second / config.samples_per_second)
    return f"{times} times as fast as the first that fitted ({differing})"


def _name_apart(config: Trial, rung: str | None, knobs: Knobs) -> str | None:
    """'zero3, micro batch 1', with what tells it from this rung with these knobs; None where a reader sees nothing."""
    name, tried = f"{config.rung}, micro batch {config.knobs.micro_batch}", config.knobs
    if describe_state(tried) != describe_state(knobs):
        return f"{name}, {describe_state(tried)}"
    if (config.rung, tried.micro_batch) != (rung, knobs.micro_batch):
        return name
    if tried.accumulation != knobs.accumulation:
        return f"{name} × accumulation {tried.accumulation}"
    return f"{name}, before tuning" if tried.settings != knobs.settings else None


def _name_next(report: FitReport) -> str | None:
    """'next is zero2 with 7.9 samples/s', of the rung that was measured to be next; None without one.

    Its rate may be above the answer's where turns, the fastest timing or the certificate decided.
    """
    if (best := _find_next(report)) is None:
        return None
    rate = f"{format_rate(best.samples_per_second)} samples/s"
    if _find_faster(report) is not None:
        unproven = describe_failed_exam(report, best.trial) or "is not proven"
        doubt = f"was faster, but {unproven}" if was_backed_off(report) else "is as fast, within noise"
        return f"{best.trial.rung} {doubt}: {rate}"
    return f"next is {best.trial.rung} with {rate}"


def _find_next(report: FitReport) -> Measured | None:
    """The fastest config of another rung that left the headroom; None without one, or where memory is the objective."""
    others = [find_fastest(report, rung) for rung in report.question.ladder if rung != report.rung]
    measured = [config for config in others if config is not None and config.leaves_headroom(find_usable(report))]
    if report.question.objective == "memory":
        return None
    return max(measured, key=lambda config: config.samples_per_second, default=None)


def _find_faster(report: FitReport) -> Measured | None:
    """The next one, where it measured more than the answer; None where it did not."""
    following = _find_next(report)
    if following is None or report.throughput is None:
        return None
    return following if following.samples_per_second > report.throughput.samples_per_second else None


def list_answer(report: FitReport) -> Iterator[tuple[str, Words]]:
    """Why it is the answer, its speed, memory and batch, and what its proof lacks, each with a name."""
    if report.knobs is None:
        return
    yield "why", _describe_claim(report)
    if report.throughput is not None:
        yield "speed", _describe_speed(report)
    if report.memory:
        uses = [f"{TIER_NAMES[tier]} {format_use(report.memory[tier])}" for tier in list_used_tiers(report.memory)]
        yield "memory", ", ".join(uses) + _describe_headroom(report)
    yield "batch", report.reasons.get("batch") or format_batch(report.knobs, report.question.gpus)
    if report.variables:
        yield "environment", " ".join(f"{name}={value}" for name, value in report.variables.items())
    if report.certificate is not None and not report.certificate.passed:
        yield "proof", describe_proof(report.certificate)


def _describe_headroom(report: FitReport) -> str:
    """'; of the card's 23.5 GiB its allocator may take no more', or that no headroom is left; '' where it is."""
    card, knobs = report.question.device_bytes, report.knobs
    if knobs is not None and knobs.keeps_headroom and card:
        return f"; of the card's {format_bytes(card)} its allocator may take no more"
    answer = None if report.rung is None else find_fastest(report, report.rung)
    return "" if answer is None or answer.leaves_headroom(find_usable(report)) else "; it leaves no headroom"


def _describe_speed(report: FitReport) -> str:
    """'9.73 samples/s (9.5–9.9 in 6 trials), 623 tokens/s'."""
    assert report.throughput is not None
    rate, tokens = report.throughput.samples_per_second, report.throughput.tokens_per_second
    text = f"{format_rate(rate)} samples/s{_format_spread(report)}"
    return text + (f", {format_rate(tokens)} tokens/s" if tokens is not None else "")


def _format_spread(report: FitReport) -> str:
    """' (9.5–9.9 in 6 trials)', with a word where the machine was not steady; nothing where one trial measured it."""
    spread = report.spread
    if spread is None or spread.trials < 2:
        return ""
    unsteady = ": this machine is busy or not steady" if spread.high > _STEADY * spread.low else ""
    return f" ({format_rate(spread.low)}–{format_rate(spread.high)} in {spread.trials} trials{unsteady})"


def _list_winner_facts(report: FitReport) -> Iterator[tuple[str, Words]]:
    """The winner's settings, and why the steps of the search stopped."""
    assert report.knobs is not None
    if report.largest_micro_batch is not None and report.largest_micro_batch != report.knobs.micro_batch:
        yield "largest", f"micro batch {report.largest_micro_batch} also fits"
    settings = (f"{key.rpartition('.')[2]} {format_value(value)}" for key, value in report.knobs.settings.items())
    if text := ", ".join(settings):
        yield "settings", text
    for step in ("grow", "tune", "certify"):
        if reason := report.reasons.get(step):
            yield step, line((reason, "dim"))
    if shares := sorted(report.importances.items(), key=lambda item: -item[1])[:_MOST_IMPORTANCES]:
        text = ", ".join(f"{key.rpartition('.')[2]} {share:.0%}" for key, share in shares)
        yield "mattered", line((f"{text} of the variation in tuning", "dim"))
    if report.question.writes_confined is not None:
        yield "your files", line((KEPT_BY_KERNEL if report.question.writes_confined else KEPT_BY_PYTHON, "dim"))
