"""The result of `autods plan` on the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..forecast.values import RungForecast, TierForecast, Verdict
from ..types import TIERS, Tier
from ..units import choose_unit, format_bytes, format_count
from .results import Forecast, SiteForecast
from .text import format_ranks, format_seconds, pairs_grid

_KINDS: Mapping[str, tuple[str, str]] = {
    "parameters": ("█", "blue"),
    "gradients": ("▓", "magenta"),
    "optimizer": ("▒", "cyan"),
    "activations": ("░", "green"),
    "buckets": ("▪", "yellow"),
    "other": ("·", "white"),
}
_WIDTH = 20
_LIMIT = "│"
_BEYOND = "▶"


def bar(rung: RungForecast, scale: int) -> Text:
    """20 signs are the card's `scale` bytes; what lies beyond is cut, with a sign that says so."""
    device = rung.memory.get("device")
    if device is None or not scale:
        return Text()
    text = Text()
    drawn, upto = 0, 0.0
    for kind, size in shares(rung).items():
        sign, style = _KINDS[kind]
        upto += size * _WIDTH / scale
        count = min(round(upto), _WIDTH) - drawn
        text.append(sign * count, style=style)
        drawn += count
    text.append(" " * (_WIDTH - drawn))
    return text.append(_BEYOND, style="red") if device.peak_bytes > scale else text.append(_LIMIT, style="dim")


def shares(rung: RungForecast) -> Mapping[str, int]:
    """Bytes by kind; what the peak holds beyond the tensors (the allocator, the context) is `other`."""
    device = rung.memory["device"]
    known = {kind: rung.breakdown.get(kind, 0) for kind in _KINDS if kind != "other"}
    return {**known, "other": max(0, device.peak_bytes - sum(known.values()))}


def legend() -> Text:
    """'█ parameters  ▓ gradients …'."""
    parts = [Text.assemble((sign, style), f" {kind}") for kind, (sign, style) in _KINDS.items()]
    return Text("  ").join(parts)


_TIERS = {"device": "of device memory", "host": "of host memory on a node", "pinned": "of pinned memory",
          "nvme": "of NVMe on a node", "shm": "of shared memory"}  # fmt: skip


def headline(said: SiteForecast) -> str:
    """'zero2 is the fastest rung that fits: …'."""
    best = said.best
    if best is None:
        return "nothing is forecast" if said.to_try else "nothing fits"
    what = "the fastest rung that fits" if best.verdict == "fits" else "the fastest rung that may fit"
    return f"{best.rung} is {what}{_batch(best)}"


def sentences(forecast: Forecast, said: SiteForecast) -> Iterator[str]:
    """What a neighbour would need, and what to do, the most useful first."""
    best = said.best
    if best is None and said.to_try:
        yield f"{' and '.join(said.to_try)} may fit: autods fit tries them"
        return
    if best is None:
        yield from _when_nothing_fits(forecast, said)
        return
    if best.verdict == "tight":
        yield f"only a real trial can tell: autods fit, with {best.rung} in the ladder"
    faster = [rung for rung in said.rungs if _comes_before(said, rung, best) and rung.memory]
    tight = [rung.rung for rung in faster if rung.verdict == "tight"]
    if tight and best.verdict == "fits":
        yield f"faster, but tight: {', '.join(tight)}; only a real trial can tell (autods fit)"
    if faster:
        yield f"the next faster one, {faster[-1].rung}, {_need(faster[-1])}"
    leaner = next((rung for rung in said.rungs if _is_leaner(rung, best)), None)
    if leaner is not None:
        more = f", up to micro batch {leaner.largest_micro_batch}" if leaner.largest_micro_batch else ""
        yield f"{leaner.rung} leaves more room: {_need(leaner)}{more}"
    if best.verdict == "fits":
        yield "prove it on the machine itself: autods fit"


def missing(rung: RungForecast) -> tuple[Tier, TierForecast] | None:
    """The tier that is overdrawn most, by share of its limit, if one is."""
    over = [(tier, said) for tier, said in rung.memory.items() if said.fill > 1]
    return max(over, key=lambda item: item[1].fill, default=None)


def _batch(rung: RungForecast) -> str:
    if rung.largest_micro_batch is None:
        return f", at micro batch {rung.micro_batch}"
    return f", up to micro batch {rung.largest_micro_batch}"


def _need(rung: RungForecast) -> str:
    """'needs 36.1 GiB of device memory, 4.1 GiB more than there is'."""
    over = missing(rung)
    if over is None:
        device = rung.memory.get("device")
        return f"needs {format_bytes(device.peak_bytes)} of device memory" if device else rung.reason
    tier, said = over
    lacking = said.peak_bytes - (said.limit_bytes or 0)
    return f"needs {format_bytes(said.peak_bytes)} {_TIERS[tier]}, {format_bytes(lacking)} more than there is"


def _when_nothing_fits(forecast: Forecast, said: SiteForecast) -> Iterator[str]:
    tried = [rung for rung in said.rungs if rung.memory]
    if not tried:
        yield "no rung applies: see the reasons above"
        return
    closest = min(tried, key=_overdraft)
    yield f"{closest.rung} comes closest: it {_need(closest)}"
    over = missing(closest)
    if over is not None and over[0] == "host" and not forecast.zero_init:
        yield "--zero-init: under deepspeed.zero.Init no rank builds the whole model in host memory (stage 3)"
    for rung in said.rungs:
        if rung.verdict == "not_applicable" and "NVMe" in rung.reason:
            yield f"--nvme 2TiB, if a node has a disk: {rung.rung} was left out for want of it"
    yield f"more ranks (--gpus {said.site.world_size * 2}): ZeRO splits the model over them"
    if any(rung.micro_batch > 1 for rung in tried):
        yield "a smaller micro batch (--micro-batch 1)"
    yield "a shorter sequence (--seq-len), or --on all: which machine would do?"


def _overdraft(rung: RungForecast) -> float:
    over = missing(rung)
    return 0.0 if over is None else over[1].fill


def _comes_before(said: SiteForecast, rung: RungForecast, best: RungForecast) -> bool:
    return said.rungs.index(rung) < said.rungs.index(best)


def _is_leaner(rung: RungForecast, best: RungForecast) -> bool:
    if rung.verdict != "fits" or "device" not in rung.memory or rung.rung == best.rung:
        return False
    return rung.memory["device"].peak_bytes < 0.8 * best.memory["device"].peak_bytes


MARKS: dict[Verdict, tuple[str, str, str]] = {
    "fits": ("✓", "fits", "green"),
    "tight": ("~", "tight", "yellow"),
    "cannot_fit": ("✗", "cannot fit", "red"),
    "not_applicable": ("–", "not applicable", "dim"),
}
# Columns from which a part stands in the table; before that it stands under it.
_WITH_BARS, _WITH_PHASES, _WITH_REASONS = 110, 122, 150


def print_plan(forecast: Forecast, console: Console) -> None:
    """Print the forecast; reads nothing but the value."""
    if len(forecast.sites) == 1:
        _show_one(forecast, forecast.sites[0], console)
    else:
        _show_several(forecast, console)
    assumed = forecast.all_assumed
    if assumed:
        console.print(Text("\nAssumed", style="bold"))
        console.print(_list(assumed, style="dim"))


def _show_one(forecast: Forecast, said: SiteForecast, console: Console) -> None:
    console.print(Text.assemble("\n", (_question(forecast, said), "bold")))
    console.print(rung_table(said.rungs, best=said.best_rung, width=console.width))
    console.print(legend())
    console.print(Text("device and pinned: a rank's; host and nvme: a node's\n", style="dim"))
    if console.width < _WITH_REASONS:
        scale = 0 if console.width >= _WITH_BARS else _scale(said.rungs)
        console.print(pairs_grid((rung.rung, _under(rung, scale)) for rung in said.rungs))
        console.print()
    styles = {"fits": "green", "tight": "yellow", "not_forecast": "yellow", "nothing_fits": "red"}
    style = f"bold {styles[said.status]}"
    spent = f"  ({format_seconds(forecast.seconds)})"
    console.print(Text.assemble((headline(said), style), (spent, "dim")))
    console.print(_list(sentences(forecast, said)))


def _under(rung: RungForecast, scale: int) -> Text:
    """What does not stand in a narrow table: the bar, the reason."""
    drawn = bar(rung, scale)
    return Text.assemble(drawn, "  " if drawn else "", rung.reason)


def _show_several(forecast: Forecast, console: Console) -> None:
    wide = console.width >= _WITH_REASONS
    console.print(Text.assemble("\n", (_workload(forecast), "bold")))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), expand=wide)
    for name in ("machine", "ranks", "fastest rung", "verdict", "device"):
        table.add_column(name, no_wrap=True)
    table.add_column("largest\nmicro batch", justify="right")
    if wide:
        table.add_column("why", ratio=1)
    for said in forecast.sites:
        table.add_row(*_machine_row(said, wide=wide))
    console.print(table)
    enough = next((said for said in forecast.sites if said.status == "fits"), None)
    spent = Text(f"({format_seconds(forecast.seconds)})", style="dim")
    if enough is None:
        console.print(Text("no machine of the list is surely enough", style="bold red"), spent)
        return
    assert enough.best is not None
    head = f"{enough.site.machine.name} is the smallest that is enough: {enough.best.rung} on {_ranks(enough)}"
    console.print(Text(head, style="bold green"), spent)
    again = f"autods plan {shlex.quote(forecast.source.path)} --gpus {enough.site.world_size}"
    console.print(_list([f"all of its rungs: {again} --on {enough.site.machine.name}"]))


def rung_table(rungs: Iterable[RungForecast], *, best: str | None, width: int) -> Table:
    """rung, verdict, memory of each tier, what it is made of, largest micro batch, deciding phase, why."""
    rungs = tuple(rungs)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), expand=width >= _WITH_REASONS)
    narrow = width < _WITH_BARS  # there lines break rather than lose their ends
    table.add_column("rung", no_wrap=True)
    table.add_column("verdict", no_wrap=not narrow, min_width=12)
    table.add_column("peak (low to high) / limit", no_wrap=not narrow)
    table.add_column("most" if narrow else "largest\nmicro batch", justify="right", no_wrap=True)
    if not narrow:
        table.add_column("made of", no_wrap=True)
    if width >= _WITH_PHASES:
        table.add_column("decides", no_wrap=True)
    if width >= _WITH_REASONS:
        table.add_column("why", ratio=1)
    scale = _scale(rungs)
    for rung in rungs:
        mark, word, style = MARKS[rung.verdict]
        word = "n/a" if narrow and rung.verdict == "not_applicable" else word
        cells = [
            Text(rung.rung, style="bold" if rung.rung == best else ""),
            Text(f"{mark} {word}", style=style),
            Text("\n").join(_tiers(rung)),
            Text(str(rung.largest_micro_batch or "")),
            bar(rung, scale),
            Text(rung.decides or ""),
            Text(rung.reason),
        ]
        table.add_row(*cells[: len(table.columns)])
    return table


def format_predicted(said: TierForecast) -> str:
    """'28.3 (27.1–30.2) / 80.0 GiB'; the limit has a unit of its own where it is far larger."""
    name, factor = choose_unit(said.peak_bytes)
    low, peak, high = (f"{size / factor:.1f}" for size in (said.low_bytes, said.peak_bytes, said.high_bytes))
    between = f" ({low}–{high})" if low != high else ""
    if not said.limit_bytes:
        return f"{peak}{between} {name}"
    if choose_unit(said.limit_bytes)[0] == name:
        return f"{peak}{between} / {said.limit_bytes / factor:.1f} {name}"
    return f"{peak}{between} {name} / {format_bytes(said.limit_bytes)}"


def _tiers(rung: RungForecast) -> Iterator[Text]:
    """One line a tier; host and NVMe are a node's."""
    for tier in TIERS:
        if tier in rung.memory:
            yield Text.assemble((f"{tier:<7}", "dim"), format_predicted(rung.memory[tier]))


def _scale(rungs: Iterable[RungForecast]) -> int:
    """Bytes that a whole bar stands for: the card, so that a bar beyond it is seen to be."""
    devices = [rung.memory["device"] for rung in rungs if "device" in rung.memory]
    return max((device.limit_bytes or device.peak_bytes for device in devices), default=0)


def _machine_row(said: SiteForecast, *, wide: bool) -> list[RenderableType]:
    best = said.best or (said.rungs[-1] if said.rungs else None)
    machine = Text(said.site.machine.name)
    if best is None:
        return [machine, Text(_ranks(said)), Text(), Text(), Text(), Text(), *([Text()] if wide else [])]
    fitting = said.best is not None
    mark, word, style = MARKS[best.verdict if fitting or best.verdict == "not_applicable" else "cannot_fit"]
    device = best.memory.get("device")
    memory = format_predicted(device) if device is not None else format_bytes(said.site.machine.device_bytes)
    row: list[RenderableType] = [machine, Text(_ranks(said)), Text(best.rung if fitting else "none", style="bold")]
    row += [Text(f"{mark} {word}", style=style), Text(memory), Text(str(best.largest_micro_batch or ""))]
    return [*row, *([Text(best.reason)] if wide else [])]


def _ranks(said: SiteForecast) -> str:
    site = said.site
    ranks = f"{site.nodes} × {site.ranks_per_node}" if site.nodes > 1 else str(site.world_size)
    return f"{ranks} {site.precision}"


def _question(forecast: Forecast, said: SiteForecast) -> str:
    """'llama, 6.74B parameters, sequence 2048, micro batch 1, bf16, checkpointing on: 8 ranks × 80.0 GiB'."""
    site = said.site
    nodes = f" on {site.nodes} nodes" if site.nodes > 1 else ""
    card = f" ({site.machine.name})" if site.machine.links else ""
    return (
        f"{_workload(forecast)}, micro batch {site.micro_batch}, {site.precision}: "
        f"{format_ranks(site.world_size, forecast.device)}{nodes} × {format_bytes(site.machine.device_bytes)}{card}"
    )


def _workload(forecast: Forecast) -> str:
    facts, source = forecast.facts, forecast.source
    target = f" to {source.target_len}" if source.target_len else ""
    sequence = f", sequence {facts.tokens_per_sample}{target}" if facts.tokens_per_sample else ""
    recomputes = "on" if forecast.checkpointing else "off"
    split = ", zero.Init" if forecast.zero_init else ""
    return f"{source.name}, {format_count(facts.parameters)} parameters{sequence}, checkpointing {recomputes}{split}"


def _list(lines: Iterable[str], *, style: str = "") -> RenderableType:
    return Group(*(Padding(Text(f"· {line}", style=style), (0, 0, 0, 2)) for line in lines))
