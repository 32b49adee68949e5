"""The document of `autods plan`: what each rung needs, how fast it is, and which machine is enough.

A row is a `PlanRow` of a rung or a `SiteForecast` of a machine. A column of theirs is one entry of `RUNGS`, `SPEEDS`
or `MACHINES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from ...config.base_config import precision_name
from ...config.catalogue import ASKED, HERE, Site
from ...forecast.predict.step_time import Speed
from ...forecast.values import PHASES, RungForecast
from ...types import TIERS
from ...units import format_bytes, format_count
from .. import document as doc
from ..document import Cell, Column, Medium, Words, line, make_document, tabulate, titled
from ..results.plan import PlanReport, SiteForecast, Training
from ..text import MARKS, format_predicted, format_ranks, format_rate, format_seconds
from .plan_advice import (
    compare_machines,
    describe_machines_answer,
    describe_site_answer,
    explain_no_time,
    format_cost,
    format_days,
    format_money,
    format_ranks_of_site,
    format_spent,
    format_step,
    list_suggestions,
)

_STATUS_STYLES = {"fits": "green", "tight": "yellow", "not_forecast": "yellow", "nothing_fits": "red"}


# The rungs of a machine.


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """The forecast of a rung. `training` is that of the plan's tokens, None without."""

    rung: RungForecast
    is_best: bool = False
    training: Training | None = None


def _name_rung(row: PlanRow) -> Words:
    return line((row.rung.rung, "bold" if row.is_best else ""))


def _list_peaks(row: PlanRow) -> Cell:
    memory = [(tier, row.rung.memory[tier]) for tier in TIERS if tier in row.rung.memory]
    return tuple(line((f"{tier:<7}", "dim"), format_predicted(predicted)) for tier, predicted in memory)


def _list_phases(row: PlanRow) -> Cell:
    by_phase = row.rung.by_phase
    return tuple(f"{phase} {format_bytes(by_phase[phase])}" for phase in PHASES if phase in by_phase)


def _stack(row: PlanRow) -> Cell:
    return (doc.MemoryStack(forecast=row.rung),) if "device" in row.rung.memory else ""


RUNGS: tuple[Column[PlanRow], ...] = (
    Column(name="rung", read=_name_rung),
    Column(name="verdict", read=lambda row: MARKS[row.rung.verdict].words),
    Column(name="peak (low to high) / limit", read=_list_peaks),
    Column(name="by phase", read=_list_phases, on=Medium.PAGE),
    Column(name="largest\nbatch", read=lambda row: str(row.rung.largest_micro_batch or ""), right=True),
    Column(name="made of", read=_stack, spare=1, below=True),
    Column(name="decides", read=lambda row: row.rung.decides or "", spare=2),
    Column(name="why", read=lambda row: row.rung.reason, wraps=True, least_width=24, spare=3, below=True),
)


def _read_speed(read: Callable[[Speed], str]) -> Callable[[PlanRow], Cell]:
    """What a cell reads from the rung's speed; '–' without one."""
    return lambda row: "–" if row.rung.speed is None else read(row.rung.speed)


def _format_tokens(speed: Speed) -> str:
    return "–" if speed.tokens_per_second is None else format_rate(speed.tokens_per_second)


SPEEDS: tuple[Column[PlanRow], ...] = (
    Column(name="rung", read=_name_rung),
    Column(name="micro\nbatch", read=_read_speed(lambda speed: str(speed.micro_batch)), right=True),
    Column(name="step (low to high)", read=_read_speed(lambda speed: format_step(speed.step)), right=True),
    Column(
        name="samples/s", read=_read_speed(lambda speed: format_rate(speed.samples_per_second)), right=True, spare=2
    ),
    Column(name="tokens/s", read=_read_speed(_format_tokens), right=True),
    Column(name="days", read=lambda row: "–" if row.training is None else format_days(row.training), right=True),
    Column(name="cost", read=lambda row: "–" if row.training is None else format_cost(row.training), right=True),
    Column(name="spent on", read=_read_speed(lambda speed: format_spent(speed.step)), wraps=True, spare=1, below=True),
)


def tabulate_rungs(rungs: Iterable[RungForecast], *, best: str | None = None) -> doc.Table:
    """The verdict and the memory of each rung."""
    return tabulate(RUNGS, (PlanRow(rung=rung, is_best=rung.rung == best) for rung in rungs))


def tabulate_speeds(plan: PlanReport, site: SiteForecast) -> doc.Table:
    """The step time of each rung, or why there is none."""
    rows = []
    for rung in site.rungs:
        if rung.memory:
            rows.append(PlanRow(rung=rung, is_best=rung is site.best, training=plan.forecast_training(site, rung)))
    return tabulate(SPEEDS, rows)


# Machines.


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRow:
    """A machine with its best rung, or with the leanest one where none fits; then it has no speed."""

    site: SiteForecast
    rung: RungForecast
    training: Training | None

    @property
    def speed(self) -> Speed | None:
        return None if self.site.best is None else self.site.best.speed


def _describe_rung(row: MachineRow) -> Cell:
    best, rung = row.site.best, row.rung
    mark = MARKS["cannot_fit" if best is None and rung.verdict != "not_applicable" else rung.verdict]
    batch = f", batch {best.largest_micro_batch}" if best is not None and best.largest_micro_batch else ""
    return line((row.site.best_rung or "none", "bold")), line(mark.words, batch)


def _describe_rate(row: MachineRow, *, tokens: bool) -> Cell:
    speed = row.speed
    if speed is None or (speed.tokens_per_second is not None) is not tokens:
        return "" if row.site.best is None else "–"
    rate = speed.tokens_per_second or speed.samples_per_second
    low, high = (rate * speed.step.seconds / bound_s for bound_s in (speed.step.high_seconds, speed.step.low_seconds))
    return _with_bounds(format_rate(rate), low, high)


def _describe_cost(row: MachineRow) -> Cell:
    training = row.training
    if training is None or training.cost is None or training.low_cost is None or training.high_cost is None:
        return "–"
    return _with_bounds(format_money(training.cost), training.low_cost, training.high_cost)


def _describe_days(row: MachineRow) -> Cell:
    training = row.training
    return "–" if training is None else _with_bounds(format_rate(training.days), training.low_days, training.high_days)


def _with_bounds(value: str, low: float, high: float) -> Cell:
    """'2,048,000', and below it '1.71M–2.56M'."""
    return value, "–".join(format_count(bound) if bound >= 1000 else format_rate(bound) for bound in (low, high))


def _describe_device(row: MachineRow) -> Cell:
    device = row.rung.memory.get("device")
    if device is None:
        return format_bytes(row.site.site.machine.device_bytes)
    peak, bracket, interval = format_predicted(device).partition(" (")
    return (peak, f"({interval}") if bracket else peak


MACHINES: tuple[Column[MachineRow], ...] = (
    Column(name="machine\nranks", read=lambda row: (row.site.site.machine.name, format_ranks_of_site(row.site))),
    Column(name="rung\nlargest batch", read=_describe_rung),
    Column(name="tokens/s", read=lambda row: _describe_rate(row, tokens=True), right=True),
    Column(name="samples/s", read=lambda row: _describe_rate(row, tokens=False), right=True),
    Column(name="days", read=_describe_days, right=True),
    Column(name="cost", read=_describe_cost, right=True),
    Column(name="bound by", read=lambda row: "" if row.speed is None else row.speed.step.bound, spare=1),
    Column(name="device", read=_describe_device, spare=2),
    Column(name="why", read=lambda row: row.rung.reason, wraps=True, least_width=24, spare=3),
)
_NO_RUNG = RungForecast(rung="none", verdict="not_applicable", reason="", micro_batch=1)


def tabulate_machines(plan: PlanReport) -> doc.Table:
    """A row a machine, the fastest that is enough first."""
    rows = (
        MachineRow(
            site=site,
            rung=site.best or (site.rungs[-1] if site.rungs else _NO_RUNG),
            training=plan.forecast_training(site, site.best),
        )
        for site in plan.ranked_sites
    )
    return tabulate(MACHINES, rows)


# The document.


def make_plan_document(plan: PlanReport) -> doc.Document:
    """What a plan shows: the rungs of one machine, or the machines side by side and a section of a page for each."""
    several = len(plan.sites) > 1
    question = (
        describe_workload(plan) if several else f"{describe_workload(plan)}, {describe_site(plan, plan.sites[0].site)}"
    )
    parts = _list_parts_of_machines(plan) if several else _list_parts_of_site(plan, plan.sites[0])
    assumed = doc.Bullets(items=tuple(line((sentence, "dim")) for sentence in plan.assumed))
    versions = doc.Pairs(items=tuple(sorted(plan.versions.items())), on=Medium.PAGE)
    return make_document(
        title=plan.source.name,
        question=question,
        parts=(*parts, *titled("Assumed", assumed), *titled("Versions", versions)),
    )


def _list_parts_of_machines(plan: PlanReport) -> Iterator[doc.Part]:
    yield tabulate_machines(plan)
    style = "bold red" if plan.smallest_enough is None else "bold green"
    yield doc.Headline(
        words=line((describe_machines_answer(plan), style)), effort=f"forecast in {format_seconds(plan.seconds)}"
    )
    yield doc.Bullets(items=tuple(compare_machines(plan)))
    yield doc.Legend(on=Medium.PAGE)
    for site in plan.sites:
        name = {HERE: "this machine", ASKED: "the machine"}.get(site.site.machine.name, site.site.machine.name)
        yield doc.Heading(words=f"{name}: {describe_site_answer(site)}", on=Medium.PAGE)
        yield doc.Paragraph(words=describe_site(plan, site.site), on=Medium.PAGE)
        parts = (*_list_tables(plan, site), doc.Bullets(items=tuple(list_suggestions(plan, site))))
        yield from (replace(part, on=Medium.PAGE) for part in parts if not isinstance(part, doc.Legend))


def _list_parts_of_site(plan: PlanReport, site: SiteForecast) -> Iterator[doc.Part]:
    yield from _list_tables(plan, site)
    yield _make_headline(describe_site_answer(site), f"bold {_STATUS_STYLES[site.status]}", plan)
    yield doc.Bullets(items=tuple(list_suggestions(plan, site)))


def _make_headline(answer: str, style: str, plan: PlanReport) -> doc.Headline:
    return doc.Headline(words=line((answer, style)), effort=f"forecast in {format_seconds(plan.seconds)}", gap=True)


def _list_tables(plan: PlanReport, site: SiteForecast) -> Iterator[doc.Part]:
    rungs, speeds = tabulate_rungs(site.rungs, best=site.best_rung), tabulate_speeds(plan, site)
    yield rungs
    yield doc.Legend()
    yield doc.Paragraph(words=line(("device and pinned: a rank's; host and nvme: a node's", "dim")))
    if any(rung.speed for rung in site.rungs if rung.memory):
        yield speeds
    else:
        yield doc.Paragraph(words=line((f"step time: –, because {explain_no_time(site)}", "dim")), gap=True)


def describe_workload(plan: PlanReport) -> str:
    """'llama, 6.74B parameters, sequence 2048, checkpointing on'."""
    facts, source = plan.facts, plan.source
    target = f" to {source.target_len}" if source.target_len else ""
    sequence = f", sequence {facts.seq_len}{target}" if facts.seq_len else ""
    checkpointing = "on" if plan.checkpointing else "off"
    split = ", zero.Init" if plan.zero_init else ""
    parameters = format_count(facts.parameters)
    return f"{source.name}, {parameters} parameters{sequence}, checkpointing {checkpointing}{split}"


def describe_site(plan: PlanReport, site: Site) -> str:
    """'micro batch 1, bf16: 8 cuda ranks × 80.0 GiB (a100-80gb)'."""
    nodes = f" on {site.nodes} nodes" if site.nodes > 1 else ""
    name = site.machine.title if site.machine.name == HERE else site.machine.name
    card = f" ({name})" if site.machine.links else ""
    ranks = f"{format_ranks(site.world_size, plan.device)}{nodes} × {format_bytes(site.machine.device_bytes)}{card}"
    return f"micro batch {site.micro_batch}, {precision_name(site.base)}: {ranks}"
