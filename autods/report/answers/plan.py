"""The document of `autods plan`: what each rung needs, how fast it is, which machine is enough, and what to do.

A row is a `PlanRow` of a rung or a `SiteForecast` of a machine. A column of theirs is one entry of `list_columns`,
`RUNGS`, `SPEEDS` or `MACHINES`.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ...config.catalogue import ASKED, HERE, Site
from ...config.deepspeed import choose_accumulation, count_replicas
from ...forecast.predict.step_time import Speed, StepTime
from ...forecast.values import PHASES, ForecastPhase, RungForecast
from ...types import TIERS, Knobs, Tier
from ...units import choose_unit, format_bytes, format_count, format_factor
from .. import document as doc
from ..document import Cell, Column, Medium, Words, line, make_document, tabulate, titled
from ..results.plan import PlanReport, SiteForecast, Training
from ..text import (
    MARKS,
    Mark,
    format_batch,
    format_number_of,
    format_predicted,
    format_ranks,
    format_rate,
    format_seconds,
    format_share,
)
from .remedies import (
    describe_loading,
    describe_need,
    describe_partitioned_build,
    describe_way_out,
    find_fullest_tier,
    list_plan_remedies,
)

_WORTH_NAMING = 0.1  # of a step
_WORTH_MENDING = 0.03
_CLEARLY_LEANER = 0.8  # of the best rung's device memory
_MAY_FIT = ("fits", "tight")
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


def list_columns(unit: str, factor: int) -> tuple[Column[PlanRow], ...]:
    """The columns of the table below the answer, bytes in one unit. A rung that does not fit has no speed there."""

    def read_peak(tier: Tier) -> Callable[[PlanRow], Cell]:
        return lambda row: f"{row.rung.memory[tier].peak_bytes / factor:,.1f}" if tier in row.rung.memory else ""

    def read_speed(read: Callable[[Speed], str]) -> Callable[[PlanRow], Cell]:
        read_cell = _read_speed(read)
        return lambda row: read_cell(row) if row.rung.verdict in _MAY_FIT else "–"

    def mark(row: PlanRow) -> Mark:
        return MARKS[row.rung.verdict]

    spare: Mapping[Tier, int] = {"device": 0, "host": 2, "pinned": 4, "nvme": 3}
    memory = (
        Column(name=f"{tier}\n{unit}", read=read_peak(tier), right=True, spare=spare[tier])
        for tier in TIERS
        if tier in spare
    )
    return (
        Column(name="rung", read=lambda row: line(mark(row)[::2], " ", _name_rung(row))),
        Column(name="verdict", read=lambda row: mark(row).word, spare=5),
        *memory,
        Column(name="largest\nbatch", read=lambda row: str(row.rung.largest_micro_batch or ""), right=True),
        Column(name="step\n(s)", read=read_speed(lambda speed: f"{speed.step.seconds:.3g}"), right=True),
        Column(
            name="samples/s", read=read_speed(lambda speed: format_rate(speed.samples_per_second)), right=True, spare=6
        ),
        Column(name="tokens/s", read=read_speed(_format_tokens), right=True),
        Column(
            name="days", read=lambda row: "–" if row.training is None else format_rate(row.training.days), right=True
        ),
        Column(name="bound by", read=read_speed(lambda speed: speed.step.bound), spare=1),
    )


def _list_peaks(row: PlanRow) -> tuple[Words, ...]:
    memory = [(tier, row.rung.memory[tier]) for tier in TIERS if tier in row.rung.memory]
    return tuple(line((f"{tier:<7}", "dim"), format_predicted(predicted)) for tier, predicted in memory)


def _list_phases(read: Callable[[RungForecast], Mapping[ForecastPhase, int]]) -> Callable[[PlanRow], Cell]:
    def read_cell(row: PlanRow) -> Cell:
        by_phase = read(row.rung)
        return tuple(f"{phase} {format_bytes(by_phase[phase])}" for phase in PHASES if phase in by_phase)

    return read_cell


def _stack(row: PlanRow) -> Cell:
    return (doc.MemoryStack(forecast=row.rung),) if "device" in row.rung.memory else ""


_ELSEWHERE = Medium.TERMINAL | Medium.MARKDOWN  # a page has the table of the answer above, and draws the device
RUNGS: tuple[Column[PlanRow], ...] = (
    Column(name="rung", read=_name_rung),
    Column(name="verdict", read=lambda row: MARKS[row.rung.verdict].words, on=_ELSEWHERE),
    Column(name="peak (low to high) / limit", read=_list_peaks, on=_ELSEWHERE),
    Column(name="largest\nbatch", read=lambda row: str(row.rung.largest_micro_batch or ""), right=True, on=_ELSEWHERE),
    Column(name="made of", read=_stack, spare=1, below=True),
    Column(name="by phase", read=_list_phases(lambda rung: rung.by_phase), on=Medium.PAGE),
    Column(name="host of a node\nby phase", read=_list_phases(lambda rung: rung.host_by_phase), on=Medium.PAGE),
    Column(name="decides", read=lambda row: row.rung.decides or "", spare=2),
    Column(name="other memory (low to high) / limit", read=lambda row: _list_peaks(row)[1:], on=Medium.PAGE),
    Column(
        name="why", read=lambda row: row.rung.reason, wraps=True, least_width=24, spare=3, below=True, on=_ELSEWHERE
    ),
    Column(name="why", read=lambda row: "" if row.rung.verdict == "fits" else row.rung.reason, on=Medium.PAGE),
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


def tabulate_answer(plan: PlanReport, site: SiteForecast) -> doc.Table:
    """The memory of each rung, and the speed of those that may fit."""
    peaks_bytes = (rung.memory["device"].peak_bytes for rung in site.rungs if "device" in rung.memory)
    largest_bytes = max(peaks_bytes, default=1)
    rows = (
        PlanRow(rung=rung, is_best=rung is site.best, training=plan.forecast_training(site, rung))
        for rung in site.rungs
    )
    return tabulate(list_columns(*choose_unit(largest_bytes)), rows)


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
    bounds_s = (speed.step.high_seconds, speed.step.low_seconds)
    low, high = (rate * speed.step.seconds / bound_s if bound_s else math.inf for bound_s in bounds_s)
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
    """'2,048,000', and below it '1.71M–2.56M', or the one bound that is known."""
    texts = [format_count(bound) if 1000 <= bound < math.inf else format_rate(bound) for bound in (low, high)]
    return value, f"from {texts[0]}" if high == math.inf else f"up to {texts[1]}" if not low else "–".join(texts)


def _describe_device(row: MachineRow) -> Cell:
    device = row.rung.memory.get("device")
    return format_bytes(row.site.site.machine.device_bytes) if device is None else format_predicted(device)


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
        yield doc.Heading(words=f"{name}: {describe_site_answer(plan, site)}", on=Medium.PAGE)
        yield doc.Paragraph(words=describe_site(plan, site.site), on=Medium.PAGE)
        sentences = (*list_suggestions(plan, site), *compare_speeds(site, faster=False))
        parts = (tabulate_answer(plan, site), doc.Bullets(items=sentences), *_list_tables(plan, site))
        yield from (replace(part, on=Medium.PAGE) for part in parts if not isinstance(part, doc.Legend))


def _list_parts_of_site(plan: PlanReport, site: SiteForecast) -> Iterator[doc.Part]:
    answer = describe_site_answer(plan, site)
    words = line((answer[0].upper() + answer[1:], f"bold {_STATUS_STYLES[site.status]}"))
    yield doc.Headline(words=words, effort=f"forecast in {format_seconds(plan.seconds)}")
    yield tabulate_answer(plan, site)
    yield from (replace(part, on=part.on & ~Medium.VERBOSE) for part in _explain_figures(site))
    yield doc.Bullets(items=tuple(list_suggestions(plan, site)))
    yield doc.Bullets(items=tuple(compare_speeds(site, faster=False)), on=Medium.DETAILS)
    yield from (replace(part, on=part.on & Medium.DETAILS) for part in _list_tables(plan, site))


def _list_tables(plan: PlanReport, site: SiteForecast) -> Iterator[doc.Part]:
    yield doc.Heading(words="Memory of each rung", on=Medium.PAGE)
    yield doc.Legend()
    yield tabulate_rungs(site.rungs, best=site.best_rung)
    yield from (replace(part, on=Medium.VERBOSE) for part in _explain_figures(site))
    if _has_times(site):
        yield doc.Heading(words="Step time of each rung", on=Medium.PAGE)
        yield tabulate_speeds(plan, site)


def _has_times(site: SiteForecast) -> bool:
    return any(rung.speed for rung in site.rungs if rung.memory)


def _explain_figures(site: SiteForecast) -> Iterator[doc.Part]:
    """Whose memory it is, and why there is no time."""
    yield doc.Paragraph(words=line(("device and pinned: a rank's; host and nvme: a node's", "dim")))
    if not _has_times(site):
        yield doc.Paragraph(words=line((f"step time: –, because {explain_no_time(site)}", "dim")))


def describe_workload(plan: PlanReport) -> str:
    """'llama, 6.74B parameters, sequence 2048, checkpointing on'."""
    facts, source = plan.facts, plan.source
    target = f" to {source.target_len}" if source.target_len else ""
    sequence = f", sequence {facts.seq_len}{target}" if facts.seq_len else ""
    checkpointing = "on" if plan.checkpointing else "off"
    split = ", built split (zero.Init)" if plan.zero_init else ""
    if not plan.zero_init and not source.form.runs_as_main:
        split = ", built whole in each rank"
    parameters = f"{format_count(facts.parameters)} parameters"
    if facts.trained_parameters is not None:
        parameters += f", {format_count(facts.trained_parameters)} of them trained"
    return f"{source.name}, {parameters}{sequence}, checkpointing {checkpointing}{split}"


def describe_site(plan: PlanReport, site: Site) -> str:
    """'micro batch 1 × accumulation 2 × 8 ranks = global batch 16, bf16: 8 cuda ranks on 1 node × 80.0 GiB (…)'."""
    nodes = f" on {format_number_of(site.nodes, 'node')}"
    name = site.machine.title if site.machine.name == HERE else site.machine.name
    card = f" ({name})" if site.machine.links else ""
    ranks = f"{format_ranks(site.world_size, plan.device)}{nodes} × {format_bytes(site.machine.device_bytes)}{card}"
    links = "" if site.machine.links is None or site.ranks_per_node < 2 else f", {_describe_links(site)}"
    return f"{_describe_batch(plan, site, site.micro_batch)}, {site.precision}: {ranks}{links}"


def _describe_batch(plan: PlanReport, site: Site, micro_batch: int) -> str:
    """'micro batch 1 × accumulation 2 × 8 ranks = global batch 16'."""
    replicas = count_replicas(site.base, site.world_size)
    accumulation = choose_accumulation(site, micro_batch, plan.source.form)
    knobs = Knobs(micro_batch=micro_batch, accumulation=accumulation)
    return format_batch(knobs, replicas, "ranks" if replicas == site.world_size else "replicas")


def _describe_links(site: Site) -> str:
    """'NVLink 3', 'NVLink 3, 8 × HDR InfiniBand between nodes'."""
    links = site.machine.links
    assert links is not None
    inside = links.between_gpus
    return f"{inside}, {links.network} between nodes" if site.nodes > 1 and links.network else inside


# What it advises in sentences.


def describe_site_answer(plan: PlanReport, site: SiteForecast) -> str:
    """'use zero2, micro batch 6 × accumulation 2 × 8 ranks = global batch 96: 15,403 tokens/s, bound by compute'."""
    best = site.best
    if best is None:
        return "nothing is forecast" if site.to_try else describe_way_out(site.partitioned) or "nothing fits"
    verb = "use" if best.verdict == "fits" else "try"
    answer = f"{verb} {best.rung}, {_describe_batch(plan, site.site, best.largest_micro_batch or best.micro_batch)}"
    if best.speed is None:
        return f"{answer}: the first that {'fits' if best.verdict == 'fits' else 'may fit'}"
    return f"{answer}: {format_speed(best.speed)}, bound by {best.speed.step.bound}"


def list_suggestions(plan: PlanReport, site: SiteForecast) -> Iterator[str]:
    """The needs of the neighbouring rungs and what to do next, the most useful first."""
    best, timeline = site.best, plan.timeline
    if timeline is not None:
        step = f"a step of {timeline.rung} at micro batch {timeline.micro_batch}"
        yield f"{step} is drawn in {timeline.path}: open it in https://ui.perfetto.dev"
    if best is None:
        if site.to_try:
            yield f"{' and '.join(site.to_try)} may fit: autods fit tries them"
        else:
            yield from list_plan_remedies(plan, site)
        return
    if best.verdict == "tight":
        yield f"only a real trial can tell: autods fit, with {best.rung} in the ladder"
        if site.partitioned is not None:
            yield describe_partitioned_build(site.partitioned)
    if (training := describe_training(plan, site)) is not None:
        yield training
    first = next(rung for rung in site.rungs if rung.verdict == best.verdict)
    if first is not best and first.speed is not None and best.speed is not None:
        times = format_factor(best.speed.samples_per_second / first.speed.samples_per_second)
        yield (
            f"{first.rung} comes first in the ladder, but {best.rung} is forecast {times} times as fast: a step of"
            f" {first.rung} is spent on {format_spent(first.speed.step)}"
        )
    yield from compare_speeds(site, faster=True)
    if (cost := describe_accumulation(site)) is not None:
        yield cost
    if (building := describe_loading(plan, site) or describe_building(site)) is not None:
        yield building
    if best.speed is not None and (unaligned := describe_unaligned(best.speed)) is not None:
        yield unaligned
    before = [rung for rung in site.rungs[: site.rungs.index(best)] if rung.memory and _may_be_faster(rung, best)]
    faster = [rung for rung in before if _has_comparable_speed(rung, best)]
    for rungs, word in ((faster, "faster"), ([each for each in before if each not in faster], "first in the ladder")):
        if (tight := [rung.rung for rung in rungs if rung.verdict == "tight"]) and best.verdict == "fits":
            yield f"{word}, but tight: {', '.join(tight)}; only a real trial can tell (autods fit)"
    if before:
        place = "next faster one" if before[-1] in faster else "one before it in the ladder"
        yield f"the {place}, {before[-1].rung}, {describe_need(before[-1])}"
    clearly_less = _CLEARLY_LEANER * best.memory["device"].peak_bytes
    fitting = [rung for rung in site.rungs if rung.verdict == "fits" and "device" in rung.memory]
    leaner = next((rung for rung in fitting if rung.memory["device"].peak_bytes < clearly_less), None)
    if leaner is not None:
        more = f", up to micro batch {leaner.largest_micro_batch}" if leaner.largest_micro_batch else ""
        yield f"{leaner.rung} leaves more memory free: {describe_need(leaner)}{more}"
    yield from (f"{rung.rung}: {rung.reason}" for rung in site.rungs if rung.verdict == "not_applicable")
    if best.verdict == "fits":
        yield "prove it on the machine itself: autods fit"


def describe_accumulation(site: SiteForecast) -> str | None:
    """What accumulation costs the best rung; None where the user said how many micro batches a step has."""
    best, alone = site.best, site.unaccumulated
    if best is None or alone is None or "device" not in best.memory or "device" not in alone.memory:
        return None
    need_bytes, batch = (
        alone.memory["device"].peak_bytes,
        best.micro_batch * count_replicas(site.site.base, site.site.world_size),
    )
    cost_bytes = best.memory["device"].peak_bytes - need_bytes
    if cost_bytes < _WORTH_MENDING * need_bytes:
        return None
    return (
        f"accumulation costs {best.rung} {format_bytes(cost_bytes)} of device memory for gradients: one micro batch a"
        f" step needs {format_bytes(need_bytes)} at micro batch {best.micro_batch} (--global-batch {batch})"
    )


def describe_building(site: SiteForecast) -> str | None:
    """Where building decides the memory of a rung, and how it is split; None where `partitioned` says it."""
    if not site.built_whole or site.partitioned is not None:
        return None
    rungs = ", ".join(site.built_whole)
    return (
        f"building the whole model in each rank decides the memory of {rungs};"
        " the HF Trainer builds it split, as --zero-init does"
    )


def _may_be_faster(rung: RungForecast, best: RungForecast) -> bool:
    """Whether a rung before the best in the ladder could beat it, if it fitted."""
    if rung.verdict == best.verdict:
        return False
    if rung.speed is None or best.speed is None or not _has_comparable_speed(rung, best):
        return True
    return rung.speed.samples_per_second > best.speed.samples_per_second


def _has_comparable_speed(rung: RungForecast, best: RungForecast) -> bool:
    """Whether both have a time. Rates of other batches do not tell which is faster."""
    return rung.speed is not None and best.speed is not None and rung.speed.micro_batch == best.speed.micro_batch


def describe_training(plan: PlanReport, site: SiteForecast) -> str | None:
    """'300B tokens take 30.7 (23–39.9) days, 5,890 GPU-hours, and cost …'; None where no training was asked about."""
    if plan.tokens is None:
        return None
    tokens, best = f"{format_count(plan.tokens)} tokens", site.best
    if best is None:
        return f"{tokens}: no time, because no rung fits"
    training = plan.forecast_training(site, best)
    if training is None:
        return f"{tokens}: no time, because {explain_no_time(site)}"
    hours = f"{format_rate(training.gpu_hours)} GPU-hours"
    cost = "" if training.cost is None else f", and cost {format_cost(training)}"
    return f"{tokens} take {format_days(training)} days with {best.rung}: {hours}{cost}"


def compare_speeds(site: SiteForecast, *, faster: bool | None = None) -> Iterator[str]:
    """What other settings of the best rung, and other rungs, would give; nothing where the time is not known.

    With `faster` only what may fit and is faster than the answer, or only the rest.
    """
    best = site.best
    if best is None or best.speed is None:
        return
    rate, measure = best.speed.samples_per_second, "samples/s" if best.speed.tokens_per_second is None else "tokens/s"
    for alternative in site.alternatives:
        forecast, size = alternative.forecast, f"micro batch {alternative.forecast.micro_batch}"
        is_faster = (
            forecast.verdict in _MAY_FIT and forecast.speed is not None and forecast.speed.samples_per_second > rate
        )
        if faster is not None and faster is not is_faster:
            continue
        if alternative.switched:
            manner, state = ("with", "on") if alternative.checkpointing else ("without", "off")
            if forecast.offloads_inputs:
                manner, state = "with layers' inputs on the host under", "offload"
            size, option = f"{manner} activation checkpointing, {size}", f" (--checkpointing {state})"
        else:
            size, option = f"{size} instead of {best.speed.micro_batch}", ""
        gain = (
            ""
            if forecast.speed is None
            else f"{format_factor(forecast.speed.samples_per_second / rate)} × the {measure}"
        )
        lack = describe_need(forecast) if find_fullest_tier(forecast) else "is tight"
        if known := ", but ".join(filter(None, (gain, "" if forecast.verdict == "fits" else lack))):
            yield f"{size}: {known}{option}"
    others = [
        f"{rung.rung} {format_factor(rung.speed.samples_per_second / rate)} ×"
        for rung in site.rungs
        if rung is not best and rung.verdict in _MAY_FIT and rung.speed is not None
    ]
    if others and not faster:
        yield f"the other rungs beside {best.rung}, each at its micro batch: {', '.join(others)}"


def describe_unaligned(speed: Speed) -> str | None:
    """'12 % of the step goes to matmuls whose rows …'; None where that is little."""
    lost = speed.step.unaligned_seconds / speed.step.seconds
    if lost < _WORTH_MENDING:
        return None
    return (
        f"{lost:.0%} of the step goes to matmuls whose rows do not begin at multiples of 16 bytes:"
        " make sizes such as the vocabulary's multiples of 64"
    )


def explain_no_time(site: SiteForecast) -> str:
    """'the file of the machine lacks dram_gb_per_s'."""
    machine, links = site.site.machine, site.site.machine.links
    if machine.rates is None:
        card = machine.title if machine.name == HERE else "the card"
        return f"the rates of {card} are not known (--on NAME or FILE.toml has them)"
    figures: dict[str, object] = {"links": links, "dram_gb_per_s": machine.dram_gb_per_s}
    if links is not None and site.site.nodes > 1:
        figures["network_gb_per_s"] = links.network_gb_per_s
    if site.best is not None and "nvme" in site.best.memory:
        figures["nvme_gb_per_s"] = machine.nvme_gb_per_s
    lacks = [name for name, figure in figures.items() if figure is None]
    return f"the file of the machine lacks {' or '.join(lacks)}" if lacks else "no step was recorded"


def describe_machines_answer(plan: PlanReport) -> str:
    """'a100-80gb is the smallest that is enough: zero2 on 8 bf16; h100-80gb is the fastest: 70,100 tokens/s'."""
    enough = plan.smallest_enough
    if enough is None:
        return "no machine of the list is surely enough"
    rung = f"{enough.best_rung} on {format_ranks_of_site(enough)}"
    answer = f"{enough.site.machine.name} is the smallest that is enough: {rung}"
    fastest = next((site for site in plan.ranked_sites if site.rate), None)
    if fastest is None or fastest.best is None or fastest.best.speed is None:
        return answer
    rate = format_speed(fastest.best.speed)
    return f"{answer}; {fastest.site.machine.name} is the fastest: {rate} with {fastest.best_rung}"


def compare_machines(plan: PlanReport) -> Iterator[str]:
    """What follows: the duration and the cost of a training, machines without a time, the command for one of them."""
    ranked = [site for site in plan.ranked_sites if site.best is not None]
    known = ((site, plan.forecast_training(site, site.best)) for site in ranked)
    trainings = [(site, training) for site, training in known if training is not None]
    if plan.tokens is not None and trainings:
        (first, quickest), *_ = trainings
        tokens = f"{format_count(plan.tokens)} tokens"
        yield f"{tokens} take {format_days(quickest)} days on {first.site.machine.name}"
        priced = [(site, training) for site, training in trainings if training.cost is not None]
        if priced:
            cheap, least = min(priced, key=lambda pair: pair[1].cost or math.inf)
            name = cheap.site.machine.name
            yield f"{tokens} cost least on {name}: {format_cost(least)}, in {format_days(least)} days"
    reasons: dict[str, list[str]] = {}
    for site in ranked:
        if site.best is not None and site.best.speed is None:
            reasons.setdefault(explain_no_time(site), []).append(site.site.machine.name)
    for reason, names in reasons.items():
        yield f"no time of {', '.join(names)}, because {reason}"
    enough = plan.smallest_enough
    if enough is not None:
        machine = enough.site.machine.name
        command = f"autods plan {shlex.quote(plan.source.path)} --gpus {enough.site.world_size} --on {machine}"
        yield f"each machine has the first rung of the ladder that fits; all of its rungs: {command}"


# How its figures are written.


def format_ranks_of_site(site_forecast: SiteForecast) -> str:
    """'2 × 8 bf16'."""
    site = site_forecast.site
    ranks = f"{site.nodes} × {site.ranks_per_node}" if site.nodes > 1 else str(site.world_size)
    return f"{ranks} {site.precision}"


def _format_interval(write: Callable[[float], str], value: float, low: float, high: float) -> str:
    """'30.7 (23–39.9)'; '30.7 (up to 39.9)' without a low bound."""
    if not low:
        return f"{write(value)} (up to {write(high)})"
    return f"{write(value)} ({write(low)}–{write(high)})"


def format_step(step: StepTime) -> str:
    """'2.13 (1.6–2.77) s'."""
    return f"{_format_interval('{:.3g}'.format, step.seconds, step.low_seconds, step.high_seconds)} s"


def format_speed(speed: Speed) -> str:
    """'15,403 tokens/s', or samples/s where a sample has no fixed number of tokens."""
    if speed.tokens_per_second is None:
        return f"{format_rate(speed.samples_per_second)} samples/s"
    return f"{format_rate(speed.tokens_per_second)} tokens/s"


def format_spent(step: StepTime) -> str:
    """'compute 62 %, memory 30 %'; parts below a tenth are left out."""
    parts = sorted(step.spent.items(), key=lambda part: -part[1])
    named = [(cause, seconds / step.seconds) for cause, seconds in parts if seconds >= _WORTH_NAMING * step.seconds]
    return ", ".join(f"{cause} {format_share(round(share, 2))}" for cause, share in named)


def format_days(training: Training) -> str:
    """'30.7 (23–39.9)'."""
    return _format_interval(format_rate, training.days, training.low_days, training.high_days)


def format_cost(training: Training) -> str:
    """'11,800 (8,830–15,300)'; '–' without a price."""
    if training.cost is None or training.low_cost is None or training.high_cost is None:
        return "–"
    return _format_interval(format_money, training.cost, training.low_cost, training.high_cost)


def format_money(amount: float) -> str:
    """'11,800': three significant digits."""
    return f"{float(f'{amount:.3g}'):,.10g}"
