"""A finished fit on the terminal: what became of each rung, then the winner, or what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.text import Text

from ..units import show_bytes, show_count
from . import certificate, communication, words
from .advice import remedies, shortage
from .files import REPORT
from .ladder_table import ladder_table, reasons_of, untried, variants_of
from .launching import ACCELERATE, DS_CONFIG, DS_CONFIG_HF, lines
from .layout import pairs_grid
from .result import Report

_MOST_SHARES = 3  # keys whose importance is shown
_WIDE = 116  # columns from which the reasons stand in the table instead of under it


def show(report: Report, console: Console) -> None:
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
    if spent := list(communication.lines_of(report)):
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
    size = f", {show_count(asked['parameters'])} parameters," if asked.get("parameters") else ""
    memory = f" × {show_bytes(asked['device_bytes'])}" if asked.get("device_bytes") else ""
    if asked.get("pipeline_stages"):
        size = f"{size} a pipeline of {asked['pipeline_stages']} stages,"
    if asked.get("experts"):
        size = f"{size} {asked['experts']} experts,"
    return (
        f"{asked.get('workload', 'workload')}{size} on "
        f"{words.of_ranks(asked.get('gpus', 1), asked.get('device', ''))}{memory}"
    )


def _winner(report: Report) -> RenderableType:
    assert report.knobs is not None
    raced = report.question.get("stop") == "fastest"
    how = " is the fastest that fits" if raced else " fits, the first rung of the ladder that does"
    head = Text.assemble((f"{report.rung}", "bold green"), (how, "bold"), _spent(report))
    return Group(head, pairs_grid(_facts(report)), *_certified(report), Text("\nNext", style="bold"))


def _certified(report: Report) -> Iterator[RenderableType]:
    if report.certificate:
        yield certificate.headline(report.certificate)
        yield pairs_grid(certificate.lines_of(report.certificate))


def _spent(report: Report) -> Text:
    return Text(f"  ({len(report.trials)} trials, {words.of_seconds(report.seconds)})", style="dim")


def _facts(report: Report) -> Iterator[tuple[str, RenderableType]]:
    """The winner, fact by fact."""
    assert report.knobs is not None
    yield (
        "batch",
        Text(report.reasons.get("batch") or words.of_batch(report.knobs, int(report.question.get("gpus", 1)))),
    )
    if report.throughput:
        tokens = report.throughput.tokens_per_second
        rate = f"{words.of_rate(report.throughput.samples_per_second)} samples/s"
        yield "throughput", Text(rate + (f", {words.of_rate(tokens)} tokens/s" if tokens is not None else ""))
    if report.largest_micro_batch is not None and report.largest_micro_batch != report.knobs.micro_batch:
        yield "largest", Text(f"micro batch {report.largest_micro_batch} also fits")
    recomputes = report.knobs.checkpointing
    yield "recompute", Text("gradient checkpointing on" if recomputes else "gradient checkpointing off")
    settings = (f"{key.rpartition('.')[2]} {_show(value)}" for key, value in report.knobs.settings.items())
    if tuned := ", ".join(settings):
        yield "settings", Text(tuned)
    for act in ("grow", "tune", "accumulate"):
        if reason := report.reasons.get(act):
            yield act, Text(reason, style="dim")
    if shares := sorted(report.importances.items(), key=lambda item: -item[1])[:_MOST_SHARES]:
        said = ", ".join(f"{key.rpartition('.')[2]} {share:.0%}" for key, share in shares)
        yield "mattered", Text(f"{said} of the variation in tuning", style="dim")


def _next(report: Report) -> Iterator[Text]:
    """What to type now: whole lines, so that they can be copied."""
    for name, said in lines(report):
        yield _line(name, said)
    yield _line("files", f"{DS_CONFIG}, {DS_CONFIG_HF}, {ACCELERATE} and {REPORT} in {Path(report.out)}")


def _line(name: str, said: str) -> Text:
    return Text.assemble((f"  {name:<10}  ", "cyan"), said)


def _nothing(report: Report) -> RenderableType:
    head = Text.assemble(("nothing fits: ", "bold red"), (shortage(report), "bold"), _spent(report))
    return Group(head, pairs_grid((f"{n}.", Text(remedy)) for n, remedy in enumerate(remedies(report), 1)))


def _show(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else str(value)
