"""A forecast on the terminal: the table of rungs, or of machines, then what it recommends and what was assumed."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..forecast.values import Predicted, RungForecast, Verdict
from ..outcomes import TIERS
from ..units import show_bytes, show_count, unit_of
from . import words
from .breakdown import bar, legend
from .layout import pairs_grid
from .plan_advice import headline, sentences
from .plan_result import Forecast, SiteForecast

MARKS: dict[Verdict, tuple[str, str, str]] = {
    "fits": ("✓", "fits", "green"),
    "tight": ("~", "tight", "yellow"),
    "cannot_fit": ("✗", "cannot fit", "red"),
    "not_applicable": ("–", "not applicable", "dim"),
}
# Columns from which a part stands in the table; before that it stands under it.
_WITH_BARS, _WITH_PHASES, _WITH_REASONS = 110, 122, 150


def show(forecast: Forecast, console: Console) -> None:
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
    spent = f"  ({words.of_seconds(forecast.seconds)})"
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
    spent = Text(f"({words.of_seconds(forecast.seconds)})", style="dim")
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
            Text(f"{mark} {word}" + ("" if rung.exact else ", estimate"), style=style),
            Text("\n").join(_tiers(rung)),
            Text(str(rung.largest_micro_batch or "")),
            bar(rung, scale),
            Text(rung.decides or ""),
            Text(rung.reason),
        ]
        table.add_row(*cells[: len(table.columns)])
    return table


def of_predicted(said: Predicted) -> str:
    """'28.3 (27.1–30.2) / 80.0 GiB'; the limit has a unit of its own where it is far larger."""
    name, factor = unit_of(said.peak_bytes)
    low, peak, high = (f"{size / factor:.1f}" for size in (said.low_bytes, said.peak_bytes, said.high_bytes))
    between = f" ({low}–{high})" if low != high else ""
    if not said.limit_bytes:
        return f"{peak}{between} {name}"
    if unit_of(said.limit_bytes)[0] == name:
        return f"{peak}{between} / {said.limit_bytes / factor:.1f} {name}"
    return f"{peak}{between} {name} / {show_bytes(said.limit_bytes)}"


def _tiers(rung: RungForecast) -> Iterator[Text]:
    """One line a tier; host and NVMe are a node's."""
    for tier in TIERS:
        if tier in rung.memory:
            yield Text.assemble((f"{tier:<7}", "dim"), of_predicted(rung.memory[tier]))


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
    memory = of_predicted(device) if device is not None else show_bytes(said.site.machine.device_bytes)
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
        f"{_workload(forecast)}, micro batch {site.micro_batch}, {site.precision}: {site.world_size} {forecast.device} "
        f"ranks{nodes} × {show_bytes(site.machine.device_bytes)}{card}"
    )


def _workload(forecast: Forecast) -> str:
    facts, source = forecast.facts, forecast.source
    target = f" to {source.target_len}" if source.target_len else ""
    sequence = f", sequence {facts.tokens_per_sample}{target}" if facts.tokens_per_sample else ""
    recomputes = "on" if forecast.checkpointing else "off"
    split = ", zero.Init" if forecast.zero_init else ""
    return f"{source.name}, {show_count(facts.parameters)} parameters{sequence}, checkpointing {recomputes}{split}"


def _list(lines: Iterable[str], *, style: str = "") -> RenderableType:
    return Group(*(Padding(Text(f"· {line}", style=style), (0, 0, 0, 2)) for line in lines))
