"""The result of `autods plan` on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..config.base_config import precision_name
from ..config.catalogue import HERE, Site
from ..forecast.values import RungForecast
from ..types import TIERS, TIERS_OF_A_NODE, Tier
from ..units import format_bytes, format_count
from .machines_view import print_machines
from .plan_speed import compare_speeds, describe_training, format_speed, format_spent, speed_table
from .results.plan import PlanReport, SiteForecast
from .text import (
    BAR_CELLS,
    MARKS,
    PLAN_WITH_BARS,
    PLAN_WITH_PHASES,
    PLAN_WITH_REASONS,
    TIER_NAMES,
    bullets,
    format_predicted,
    format_ranks,
    format_seconds,
    pairs_grid,
    plain_table,
)

_TENSOR_KINDS: Mapping[str, tuple[str, str]] = {
    "parameters": ("█", "blue"),
    "gradients": ("▓", "magenta"),
    "optimizer": ("▒", "cyan"),
    "activations": ("░", "green"),
    "buckets": ("▪", "yellow"),
    "other": ("·", "white"),
}
_AT_LIMIT, _BEYOND_LIMIT = "│", "▶"
_STATUS_STYLES = {"fits": "green", "tight": "yellow", "not_forecast": "yellow", "nothing_fits": "red"}
_CLEARLY_LEANER = 0.8  # of the best rung's device memory


def print_plan(forecast: PlanReport, console: Console) -> None:
    """Print the forecast; it needs nothing but the value."""
    if len(forecast.sites) == 1:
        _print_site(forecast, forecast.sites[0], console)
    else:
        console.print(Text.assemble("\n", (describe_workload(forecast), "bold")))
        print_machines(forecast, console)
    if assumed := forecast.assumed:
        console.print(Text("\nAssumed", style="bold"))
        console.print(bullets(assumed, style="dim"))


def describe_workload(forecast: PlanReport) -> str:
    """'llama, 6.74B parameters, sequence 2048, checkpointing on'."""
    facts, source = forecast.facts, forecast.source
    target = f" to {source.target_len}" if source.target_len else ""
    sequence = f", sequence {facts.seq_len}{target}" if facts.seq_len else ""
    checkpointing = "on" if forecast.checkpointing else "off"
    split = ", zero.Init" if forecast.zero_init else ""
    parameters = format_count(facts.parameters)
    return f"{source.name}, {parameters} parameters{sequence}, checkpointing {checkpointing}{split}"


# One machine.


def _print_site(forecast: PlanReport, site_forecast: SiteForecast, console: Console) -> None:
    rungs, width = site_forecast.rungs, console.width
    head = f"\n{describe_workload(forecast)}, {describe_site(forecast, site_forecast.site)}"
    console.print(Text(head, style="bold"))
    console.print(rung_table(rungs, best=site_forecast.best_rung, width=width))
    kinds = (Text.assemble((sign, style), f" {kind}") for kind, (sign, style) in _TENSOR_KINDS.items())
    console.print(Text("  ").join(kinds))
    console.print(Text("device and pinned: a rank's; host and nvme: a node's\n", style="dim"))
    console.print(speed_table(forecast, site_forecast, width=width))
    console.print()
    if width < PLAN_WITH_REASONS:  # the columns that the table lacks
        bars = [memory_bar(rung, 0 if width >= PLAN_WITH_BARS else _bar_scale(rungs)) for rung in rungs]
        texts = [Text.assemble(bar, "  " if bar else "", rung.reason) for bar, rung in zip(bars, rungs, strict=True)]
        console.print(pairs_grid(zip((rung.rung for rung in rungs), texts, strict=True)))
        console.print()
    spent = f"  ({format_seconds(forecast.seconds)})"
    style = f"bold {_STATUS_STYLES[site_forecast.status]}"
    console.print(Text.assemble((describe_site_answer(site_forecast), style), (spent, "dim")))
    console.print(bullets(suggestions(forecast, site_forecast)))


def describe_site(forecast: PlanReport, site: Site) -> str:
    """'micro batch 1, bf16: 8 cuda ranks × 80.0 GiB (a100-80gb)'."""
    nodes = f" on {site.nodes} nodes" if site.nodes > 1 else ""
    name = site.machine.title if site.machine.name == HERE else site.machine.name
    card = f" ({name})" if site.machine.links else ""
    ranks = f"{format_ranks(site.world_size, forecast.device)}{nodes} × {format_bytes(site.machine.device_bytes)}{card}"
    return f"micro batch {site.micro_batch}, {precision_name(site.base)}: {ranks}"


def rung_table(rungs: Iterable[RungForecast], *, best: str | None, width: int) -> Table:
    """A row a rung. From certain terminal widths on: what memory holds, the deciding phase, the reason."""
    rungs = tuple(rungs)
    narrow = width < PLAN_WITH_BARS  # lines then break instead of losing their ends
    table = plain_table(expand=width >= PLAN_WITH_REASONS)
    table.add_column("rung", no_wrap=True)
    table.add_column("verdict", no_wrap=not narrow, min_width=12)
    table.add_column("peak (low to high) / limit", no_wrap=not narrow)
    table.add_column("most" if narrow else "largest\nmicro batch", justify="right", no_wrap=True)
    if not narrow:
        table.add_column("made of", no_wrap=True)
    if width >= PLAN_WITH_PHASES:
        table.add_column("decides", no_wrap=True)
    if width >= PLAN_WITH_REASONS:
        table.add_column("why", ratio=1)
    scale = _bar_scale(rungs)
    for rung in rungs:
        mark = MARKS[rung.verdict]
        if narrow and rung.verdict == "not_applicable":
            mark = mark._replace(word="n/a")
        memory = [(tier, rung.memory[tier]) for tier in TIERS if tier in rung.memory]
        lines = (Text.assemble((f"{tier:<7}", "dim"), format_predicted(predicted)) for tier, predicted in memory)
        cells = [
            Text(rung.rung, style="bold" if rung.rung == best else ""),
            mark.text(),
            Text("\n").join(lines),
            Text(str(rung.largest_micro_batch or "")),
            memory_bar(rung, scale),
            Text(rung.decides or ""),
            Text(rung.reason),
        ]
        table.add_row(*cells[: len(table.columns)])
    return table


def memory_bar(rung: RungForecast, scale: int) -> Text:
    """The device memory by kind of tensor; a full bar is `scale` bytes, and an arrow marks what lies beyond."""
    device = rung.memory.get("device")
    if device is None or not scale:
        return Text()
    text = Text()
    end = 0.0
    for kind, size in bytes_by_kind(rung).items():
        sign, style = _TENSOR_KINDS[kind]
        end += size * BAR_CELLS / scale
        text.append(sign * (min(round(end), BAR_CELLS) - len(text)), style=style)
    text.append(" " * (BAR_CELLS - len(text)))
    beyond = device.peak_bytes > scale
    return text.append(_BEYOND_LIMIT if beyond else _AT_LIMIT, style="red" if beyond else "dim")


def bytes_by_kind(rung: RungForecast) -> Mapping[str, int]:
    """Device bytes by kind of tensor; `other` is the rest of the peak (allocator, CUDA context)."""
    known = {kind: rung.breakdown.get(kind, 0) for kind in _TENSOR_KINDS if kind != "other"}
    return {**known, "other": max(0, rung.memory["device"].peak_bytes - sum(known.values()))}


def _bar_scale(rungs: Iterable[RungForecast]) -> int:
    """Bytes of a full bar: the card's memory."""
    devices = [rung.memory["device"] for rung in rungs if "device" in rung.memory]
    return max((device.limit_bytes or device.peak_bytes for device in devices), default=0)


def describe_site_answer(site: SiteForecast) -> str:
    """'zero2 is the fastest rung that fits, up to micro batch 6'."""
    best = site.best
    if best is None:
        return "nothing is forecast" if site.to_try else "nothing fits"
    size = f"at micro batch {best.micro_batch}"
    if best.largest_micro_batch is not None:
        size = f"up to micro batch {best.largest_micro_batch}"
    answer = f"{best.rung} is the fastest rung that {'fits' if best.verdict == 'fits' else 'may fit'}, {size}"
    if best.speed is None:
        return answer
    return f"{answer}: {format_speed(best.speed)}, bound by {best.speed.step.bound}"


# What to do.


def suggestions(forecast: PlanReport, site: SiteForecast) -> Iterator[str]:
    """The needs of the neighbouring rungs and what to do next, the most useful first."""
    best, timeline = site.best, forecast.timeline
    if timeline is not None:
        step = f"a step of {timeline.rung} at micro batch {timeline.micro_batch}"
        yield f"{step} is drawn in {timeline.path}: open it in https://ui.perfetto.dev"
    if best is None:
        if site.to_try:
            yield f"{' and '.join(site.to_try)} may fit: autods fit tries them"
        else:
            yield from _remedies(forecast, site)
        return
    if best.verdict == "tight":
        yield f"only a real trial can tell: autods fit, with {best.rung} in the ladder"
    if (training := describe_training(forecast, site)) is not None:
        yield training
    first = next(rung for rung in site.rungs if rung.verdict == best.verdict)
    if first is not best and first.speed is not None and best.speed is not None:
        times = best.speed.samples_per_second / first.speed.samples_per_second
        yield (
            f"{first.rung} comes first in the ladder, but {best.rung} is forecast {times:.2f} times as fast: a step of"
            f" {first.rung} is spent on {format_spent(first.speed.step)}"
        )
    yield from compare_speeds(site)
    faster = [rung for rung in site.rungs[: site.rungs.index(best)] if rung.memory and _may_be_faster(rung, best)]
    tight = [rung.rung for rung in faster if rung.verdict == "tight"]
    if tight and best.verdict == "fits":
        yield f"faster, but tight: {', '.join(tight)}; only a real trial can tell (autods fit)"
    if faster:
        yield f"the next faster one, {faster[-1].rung}, {_need(faster[-1])}"
    clearly_less = _CLEARLY_LEANER * best.memory["device"].peak_bytes
    fitting = [rung for rung in site.rungs if rung.verdict == "fits" and "device" in rung.memory]
    leaner = next((rung for rung in fitting if rung.memory["device"].peak_bytes < clearly_less), None)
    if leaner is not None:
        more = f", up to micro batch {leaner.largest_micro_batch}" if leaner.largest_micro_batch else ""
        yield f"{leaner.rung} leaves more memory free: {_need(leaner)}{more}"
    if best.verdict == "fits":
        yield "prove it on the machine itself: autods fit"


def _may_be_faster(rung: RungForecast, best: RungForecast) -> bool:
    """Whether a rung before the best in the ladder could beat it, if it fitted. Rates of other batches do not tell."""
    if rung.verdict == best.verdict:
        return False
    if rung.speed is None or best.speed is None or rung.speed.micro_batch != best.speed.micro_batch:
        return True
    return rung.speed.samples_per_second > best.speed.samples_per_second


def _remedies(forecast: PlanReport, site: SiteForecast) -> Iterator[str]:
    """Ways to make something fit, the surest first."""
    forecasts = [rung for rung in site.rungs if rung.memory]
    if not forecasts:
        yield "no rung applies: see the reasons above"
        return
    closest = min(forecasts, key=lambda rung: max(1.0, rung.fill))
    yield f"{closest.rung} comes closest: it {_need(closest)}"
    if _fullest_tier(closest) == "host" and not forecast.zero_init:
        yield "--zero-init: under deepspeed.zero.Init no rank builds the whole model in host memory (stage 3)"
    for rung in site.lacks_nvme:
        yield f"--nvme 2TiB, if a node has a disk: {rung} was left out because it needs one"
    yield f"more ranks (--gpus {site.site.world_size * 2}): ZeRO splits the model over them"
    if any(rung.micro_batch > 1 for rung in forecasts):
        yield "a smaller micro batch (--micro-batch 1)"
    yield "a shorter sequence (--seq-len), or --on all: which machine would do?"


def _need(rung: RungForecast) -> str:
    """'needs 36.1 GiB of device memory, 4.1 GiB more than there is'."""
    tier = _fullest_tier(rung)
    if tier is None:
        device = rung.memory.get("device")
        return f"needs {format_bytes(device.peak_bytes)} of device memory" if device else rung.reason
    predicted = rung.memory[tier]
    missing = predicted.peak_bytes - (predicted.limit_bytes or 0)
    memory = f"{TIER_NAMES[tier]}{' on a node' if tier in TIERS_OF_A_NODE else ''}"
    return f"needs {format_bytes(predicted.peak_bytes)} of {memory}, {format_bytes(missing)} more than there is"


def _fullest_tier(rung: RungForecast) -> Tier | None:
    """The tier that exceeds its limit by the largest share; None when none does."""
    over = [tier for tier, predicted in rung.memory.items() if predicted.fill > 1]
    return max(over, key=lambda tier: rung.memory[tier].fill, default=None)
