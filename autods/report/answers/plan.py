"""The document of `autods plan`: what each rung needs, how fast it is, which machine is enough, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...config.catalogue import ASKED, HERE, Site
from ...config.checkpointing import name_state
from ...config.deepspeed import count_sequence_sharers
from ...units import format_bytes, format_count
from .. import document as doc
from ..document import Medium, line, make_document, titled
from ..results.plan import PlanReport, SiteForecast
from ..text import format_number_of, format_ranks, format_seconds
from .plan_advice import compare_speeds, describe_site_answer, list_suggestions
from .plan_figures import MAY_FIT, describe_batch, explain_no_time
from .plan_machines import compare_machines, describe_machines_answer, tabulate_machines
from .plan_rungs import tabulate_answer, tabulate_phases, tabulate_rungs, tabulate_speeds

_STATUS_STYLES = {"fits": "green", "tight": "yellow", "not_forecast": "yellow", "nothing_fits": "red"}


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
    yield doc.Legend(gap=True)
    yield tabulate_rungs(site.rungs, best=site.best_rung)
    device = replace(tabulate_phases(site.rungs, lambda rung: rung.by_phase), on=Medium.PAGE)
    host = replace(tabulate_phases(site.rungs, lambda rung: rung.host_by_phase), on=Medium.PAGE)
    yield from titled("Device memory of a rank by phase", device)
    yield from titled("Host memory of a node by phase", host)
    yield from (replace(part, on=Medium.VERBOSE) for part in _explain_figures(site))
    if _has_times(site):
        yield doc.Heading(words="Step time of each rung", on=Medium.PAGE)
        yield tabulate_speeds(plan, site)


def _has_times(site: SiteForecast) -> bool:
    return any(rung.speed for rung in site.rungs if rung.memory)


def _explain_figures(site: SiteForecast) -> Iterator[doc.Part]:
    """Whose memory it is, and why a time is missing."""
    yield doc.Paragraph(words=line(("device and pinned: a rank's; host and nvme: a node's", "dim")))
    if any(rung.speed is not None and rung.speed.micro_batch != rung.micro_batch for rung in site.rungs):
        batches = f"memory: at micro batch {site.site.micro_batch}; step and rate: at the largest batch"
        yield doc.Paragraph(words=line((batches, "dim")))
    elif any((rung.largest_micro_batch or 0) > rung.micro_batch for rung in site.rungs):
        yield doc.Paragraph(words=line((f"memory: at micro batch {site.site.micro_batch}", "dim")))
    for which, reason in _explain_dashes(site):
        yield doc.Paragraph(words=line((f"step time{which}: –, because {reason}", "dim")))


def _explain_dashes(site: SiteForecast) -> Iterator[tuple[str, str]]:
    """Why no rung has a time, or which of those that may fit have none (' of zero3-nvme'), and why."""
    if not _has_times(site):
        yield "", explain_no_time(site)
        return
    rungs_by_reason: dict[str, list[str]] = {}
    for rung in site.rungs:
        if rung.verdict in MAY_FIT and rung.memory and rung.speed is None:
            rungs_by_reason.setdefault(explain_no_time(site, rung), []).append(rung.rung)
    for reason, rungs in rungs_by_reason.items():
        yield f" of {', '.join(rungs)}", reason


def describe_workload(plan: PlanReport) -> str:
    """'llama, 6.74B parameters, sequence 2048, checkpointing on'."""
    facts, source = plan.facts, plan.source
    target = f" to {source.target_len}" if source.target_len else ""
    sequence = f", sequence {facts.seq_len}{target}" if facts.seq_len else ""
    sharers = count_sequence_sharers(source, plan.sites[0].site.base)
    sequence += f" shared by {sharers} ranks" if sharers > 1 else ""
    sequence += ", tiled loss" if source.tiled_loss else ""
    checkpointing = name_state(plan.checkpointing)
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
    card = f" ({name})" if site.machine.links or site.machine.file else ""
    ranks = f"{format_ranks(site.world_size, plan.device)}{nodes} × {format_bytes(site.machine.device_bytes)}{card}"
    return ", ".join((f"{describe_batch(plan, site, site.micro_batch)}, {site.precision}: {ranks}", *_list_links(site)))


def _list_links(site: Site) -> Iterator[str]:
    """The links that the ranks use: 'NVLink 3', '10 Gbit/s Ethernet between nodes (assumed)'."""
    links = site.machine.links
    if links is not None and site.ranks_per_node > 1:
        yield links.between_gpus
    if links is not None and site.nodes > 1 and links.network:
        name, _, remark = links.network.partition(", ")
        yield f"{name} between nodes" + (f" ({remark})" if remark else "")
