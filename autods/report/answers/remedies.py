"""What to do where nothing fits: how much is missing, and the ways to make something fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from ...config.catalogue import ASKED
from ...config.deepspeed import count_sequence_sharers
from ...config.rungs import State, list_ladder, read_rungs, unmet_need
from ...devices import find_device
from ...forecast.predict.verdict import find_deciding_tier
from ...forecast.values import BUILT_BY_SCRIPT, PartitionedBuild, RungForecast
from ...types import TIERS_OF_A_NODE, Failed, Outcome, OutOfMemory, Tier, first_line, name_lack
from ...units import format_bytes
from ...workload.hf_config import read_config
from ...workload.long_sequences import find_most_sharers
from ...workload.lora import parse_lora
from ..results.fit import ClosestRung, FitReport
from ..results.plan import WORTH_NAMING, PlanReport, SiteForecast, find_closest
from ..text import TIER_NAMES, format_number_of

_MIB = 2**20
_USUAL_HOST_BYTES = 256 * 2**30  # where no limit is known: few machines with training cards have less
_TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16"}
_SPLITTING = "zero1,zero2,zero3"
_CLEAR_SHARE = 0.25  # of the device's peak
_PEAK_VARIATION = 1.05  # a trial's peak varies a little from run to run


def describe_shortage(report: FitReport) -> str:
    """'zero3-nvme comes closest, at least 61.2 MiB of device memory are missing'; else how the rungs ended."""
    closest = report.closest
    if closest is None:
        return _count_ends(report)
    if closest.missing_bytes is None:
        return f"{closest.rung} comes closest"
    source = "" if report.trials else "by its forecast "
    bound, size = "" if closest.exact else "at least ", format_bytes(closest.missing_bytes)
    return f"{closest.rung} comes closest, {source}{bound}{size} of {TIER_NAMES[closest.tier]} are missing"


def _count_ends(report: FitReport) -> str:
    """'each rung ran out of host memory', '2 rungs ran out of host memory, 1 failed'."""
    outcomes, lacks = _find_outcomes(report), _find_lacks(report)
    failed = [rung for rung, outcome in outcomes.items() if isinstance(outcome, Failed)]
    if not lacks:
        return f"no rung could be {'run to its end' if failed else 'tried'}"
    clauses = Counter(
        f"ran out of {name_lack(tier)}" if rung in outcomes else f"would run out of {name_lack(tier)} by the forecast"
        for rung, tier in lacks.items()
    )
    if failed:
        clauses["failed"] = len(failed)
    if len(clauses) == 1:
        has_others = bool(outcomes) and not {each.rung for each in report.skipped} <= lacks.keys()
        return f"each rung {'that was tried ' if has_others else ''}{next(iter(clauses))}"
    (clause, most), *others = clauses.most_common()
    counts = [f"{format_number_of(most, 'rung')} {clause}", *(f"{number} {clause}" for clause, number in others)]
    return ", ".join(counts)


def _find_outcomes(report: FitReport) -> dict[str, Outcome]:
    """How each rung ended that was tried, by its last trial within the limit: its leanest config."""
    return {record.trial.rung: record.outcome for record in report.trials if record.trial.limited}


def _find_lacks(report: FitReport) -> dict[str, Tier]:
    """The tier that each rung lacked, by its last trial; of those that were not tried, the tier by the forecast."""
    outcomes = _find_outcomes(report)
    lacks = {rung: outcome.tier for rung, outcome in outcomes.items() if isinstance(outcome, OutOfMemory)}
    for forecast in report.forecast:
        if forecast.rung not in outcomes and forecast.verdict == "cannot_fit" and find_fullest_tier(forecast):
            lacks[forecast.rung] = find_deciding_tier(forecast.memory)
    return lacks


def describe_partitioned_build(build: PartitionedBuild) -> str:
    """'--zero-init: with it a node needs 1.7 of 1.8 TiB of host memory, without it 3.0 TiB, because …'."""
    holder = "a node" if build.tier in TIERS_OF_A_NODE else "a rank"
    whole = f"{format_bytes(build.whole_bytes)} of {TIER_NAMES[build.tier]}"
    limit = "" if build.limit_bytes is None else f", has {format_bytes(build.limit_bytes)}"
    ranks = f"each of the {build.ranks} ranks" if build.ranks > 1 else "the rank"
    why = f"{ranks} of a node builds the whole model first"
    if build.split_bytes is None:
        return f"{build.rung} needs {whole} on {holder}, because {why}: {build.obstacle}"
    with_it = f"with it {holder} needs {format_bytes(build.split_bytes)} for {build.rung}{limit}"
    return f"--zero-init: {with_it}, and needs {whole} without it, because {why}"


def describe_way_out(build: PartitionedBuild | None) -> str | None:
    """'nothing fits without --zero-init; with it zero3 fits'; None where that is not the way."""
    if build is None or build.split_bytes is None:
        return None
    return f"nothing fits without --zero-init; with it {build.rung} {'fits' if build.verdict == 'fits' else 'may fit'}"


def list_remedies(report: FitReport) -> Iterator[str]:
    """Ways to make something fit, the surest first."""
    if report.partitioned is not None:
        yield describe_partitioned_build(report.partitioned)
    yield from dict.fromkeys(
        f"{record.trial.rung} ran out of {record.outcome.lacked}: {first_line(record.outcome.advice)}"
        for record in report.trials
        if isinstance(record.outcome, OutOfMemory) and record.outcome.tier != "device" and record.outcome.advice
    )
    yield from _list_more_memory(report)
    yield from dict.fromkeys(
        f"{rung}: {first_line(outcome.advice)}"
        for rung, outcome in _find_outcomes(report).items()
        if isinstance(outcome, Failed) and outcome.advice
    )
    if report.closest and (way := _quantize(report.question.lora, report.closest.tier)) is not None:
        yield way
    for rung in report.question.lacks_nvme:
        yield f"--nvme-path DIR on a fast disk: {rung} was skipped because it needs one"
    if not report.trials and not _lacks_memory(report):
        yield "other rungs (--ladder): none of these applies here, for the reasons in the table"
    if _lacks_node_memory_alone(report) and report.question.gpus > 1:
        yield _more_nodes(report.question.gpus, report.question.nodes)
    elif _lacks_memory(report) or report.question.gpus == 1:
        yield from _list_splitting(report.question.gpus, report.question.ladder)
    if _lacks_memory(report):
        yield "a smaller workload: shorter sequences, or a smaller model"


def _list_splitting(ranks: int, ladder: Sequence[str]) -> Iterator[str]:
    """More ranks; where no rung of the ladder splits the model, the rungs that do, and what they need."""
    if not _splits_nothing(ladder):
        yield f"more ranks (--gpus {ranks * 2}): ZeRO splits the model over them"
    elif ranks > 1:
        yield f"rungs that split the model over the ranks (--ladder {_SPLITTING}, or leave --ladder out)"
    else:  # one rank has nobody to share with, but a host
        known = read_rungs()
        rows = [known[name] for name in list_ladder(known)]
        offloading = [rung.name for rung in rows if "host" in rung.places.values() and not rung.uses_nvme]
        yield f"rungs that hold states on the host (--ladder {','.join(offloading)}, or leave --ladder out)"
        yield f"more ranks, with rungs that split the model over them (--gpus 2 --ladder {_SPLITTING})"


def _splits_nothing(ladder: Sequence[str]) -> bool:
    """Whether all rungs of a ladder are known to hold the whole model on each rank."""
    known = read_rungs()
    return bool(ladder) and all(name in known and not known[name].shards for name in ladder)


def _more_nodes(ranks: int, nodes: int) -> str:
    """On one node each further rank builds the model too, and the states there stay as many."""
    enough = ranks if ranks % (2 * nodes) == 0 else 2 * ranks
    return f"more nodes (--gpus {enough} --nodes {2 * nodes}): the ranks on each then need less of its memory"


def _lacks_memory(report: FitReport) -> bool:
    """Whether memory is what a rung lacked, and not a package or a rank."""
    return report.closest is not None or bool(_find_lacks(report))


def _lacks_node_memory_alone(report: FitReport) -> bool:
    """Whether rungs lacked memory or disk that the ranks of a node share, and no rung lacked that of a rank."""
    lacked = {*_find_lacks(report).values(), *([report.closest.tier] if report.closest else [])}
    return bool(lacked) and lacked <= {*TIERS_OF_A_NODE}


def _list_more_memory(report: FitReport) -> Iterator[str]:
    """More of what the closest rung lacked; then more of each other tier that a rung lacked."""
    closest, lacks = report.closest, _find_lacks(report)
    if closest is not None and closest.missing_bytes is not None:
        yield _more_memory(report, closest, closest.missing_bytes)
    elif closest is not None or "device" in lacks.values():
        yield "more memory per rank (--gpu-memory)"
    for tier in dict.fromkeys(lacks.values()):
        if tier != "device" and (closest is None or tier != closest.tier):
            yield f"more {TIER_NAMES[tier]}{_describe_full(report, tier)}"


def _describe_full(report: FitReport, tier: Tier) -> str:
    """': 64.0 GiB were full', by a trial; else ': zero3-offload needs …', by a forecast; '' where no size is known."""
    ends = [end for end in _find_outcomes(report).values() if isinstance(end, OutOfMemory) and end.tier == tier]
    full_bytes = max((end.limit_bytes for end in ends if end.limit_bytes is not None), default=None)
    if full_bytes is not None:
        return f": {format_bytes(full_bytes)} were full"
    lacks = _find_lacks(report)
    closest = find_closest(each for each in report.forecast if not ends and lacks.get(each.rung) == tier)
    return "" if closest is None else f": {closest.rung} {describe_need(closest)}"


def _more_memory(report: FitReport, closest: ClosestRung, missing: int) -> str:
    limit = report.question.device_bytes
    bound = "" if closest.exact else ", or more: the shortage is a lower bound"
    if closest.tier != "device" or limit is None:
        return f"{format_bytes(missing)} more {TIER_NAMES[closest.tier]}{bound}"
    enough_mib = -(-int((limit + missing) * _PEAK_VARIATION) // (16 * _MIB)) * 16
    size = f"{enough_mib}MiB" if enough_mib < 10240 else f"{-(-enough_mib // 1024)}GiB"
    if report.device.has_cards:
        return f"a card with {size} or more for each rank (--gpu-memory {size})"
    return f"--gpu-memory {size}{bound}"


def list_plan_remedies(plan: PlanReport, site: SiteForecast) -> Iterator[str]:
    """Ways to make something fit, the surest first."""
    closest = find_closest(site.rungs)
    if closest is None:
        yield from _explain_none_applies(plan, site)
        return
    if site.partitioned is not None:
        yield describe_partitioned_build(site.partitioned)
    yield f"{closest.rung} comes closest: it {describe_need(closest)}"
    if (way := _shorten_sequences(plan, site, closest)) is not None:
        yield way
    if site.partitioned is None and (loading := describe_loading(plan, site)) is not None:
        yield loading
    if (way := _quantize(plan.source.lora, find_fullest_tier(closest))) is not None:
        yield way
    for rung in site.lacks_nvme:
        yield f"--nvme 2TiB, if a node has a disk: {rung} was left out because it needs one"
    yield from _list_more_sharers(plan, site, closest)
    if any(rung.memory and rung.micro_batch > 1 for rung in site.rungs):
        yield "a smaller micro batch (--micro-batch 1)"
    if closest.decides != "init" and plan.source.takes_seq_len:
        yield "a shorter sequence (--seq-len)"
    elif closest.decides != "init" and plan.facts.seq_len is not None:
        yield f"shorter sequences than those of {plan.facts.seq_len} tokens, which the workload makes itself"
    if len(plan.sites) == 1 and find_device(plan.device).has_cards:
        instead = " in place of --gpu-memory" if site.site.machine.name == ASKED else ""
        yield f"--on all{instead}: which machine would do?"


def _explain_none_applies(plan: PlanReport, site: SiteForecast) -> Iterator[str]:
    """Why no rung of the ladder applies, and the rungs that do."""
    yield "no rung of the ladder applies"
    rungs_by_reason: dict[str, list[str]] = {}
    for forecast in site.rungs:
        rungs_by_reason.setdefault(forecast.reason, []).append(forecast.rung)
    yield from (f"{', '.join(rungs)}: {reason}" for reason, rungs in rungs_by_reason.items())
    known, asked = read_rungs(), {forecast.rung for forecast in site.rungs}
    others = [
        name
        for name in list_ladder(known)
        if name not in asked and unmet_need(known[name], site.site, plan.facts) is None
    ]
    if others:
        yield f"rungs that apply here (--ladder {','.join(others)}, or leave --ladder out)"


def _list_more_sharers(plan: PlanReport, site: SiteForecast, closest: RungForecast) -> Iterator[str]:
    """More ranks or nodes, where what they share is what the closest rung lacks room for."""
    ranks, ladder = site.site.world_size, [rung.rung for rung in site.rungs]
    if find_fullest_tier(closest) in TIERS_OF_A_NODE:
        if ranks > 1:  # one rank shares its node with nobody
            yield _more_nodes(ranks, site.site.nodes)
        return
    is_built_whole = closest.decides == "build" and not plan.zero_init
    if not is_built_whole and _would_splitting_help(closest, all_states=_splits_nothing(ladder)):
        yield from _list_splitting(ranks, ladder)


def _would_splitting_help(closest: RungForecast, *, all_states: bool) -> bool:
    """Whether the states that a rung splits over ranks are as large as the shortage, or a clear share of the peak.

    With `all_states` another rung splits weights, gradients and optimizer states.
    """
    device, held, rung = closest.memory.get("device"), closest.breakdown, read_rungs().get(closest.rung)
    if device is None or device.limit_bytes is None or not held:
        return True  # the bytes do not tell
    states = get_args(State) if all_states or rung is None else rung.shards
    states_bytes = sum(held.get(state, 0) for state in states)
    return states_bytes >= min(device.peak_bytes - device.limit_bytes, _CLEAR_SHARE * device.peak_bytes)


def _quantize(lora: str | None, full: Tier | None) -> str | None:
    """'--lora 4bit:16: QLoRA holds …'; None where weights train, have 4 bits, or the card is not what is full."""
    if lora is None or parse_lora(lora).quantized or full != "device":
        return None
    return f"--lora 4bit:{lora}: QLoRA holds the frozen weights in 4 bits, without --zero-init"


def _shorten_sequences(plan: PlanReport, site: SiteForecast, closest: RungForecast) -> str | None:
    """'--sequence-parallel 8 --tiled-loss: 190.1 GiB are activations, which …'; None where the sequence is not it."""
    source, held = plan.source, closest.breakdown
    activations_bytes = held.get("activations", 0)
    if (
        source.task != "causal-lm"
        or 2 * activations_bytes < sum(held.values())
        or find_fullest_tier(closest) != "device"
    ):
        return None
    ranks = site.site.world_size if count_sequence_sharers(source, site.site.base) == 1 else 1
    sharers = find_most_sharers(read_config(Path(source.path)), ranks)
    ways = [f"--sequence-parallel {sharers}"] * (sharers > 1) + ["--tiled-loss"] * (not source.tiled_loss)
    if not ways:
        return None
    share = f"{sharers} ranks then share each sequence" if sharers > 1 else "logits are then made in tiles"
    return f"{' '.join(ways)}: {format_bytes(activations_bytes)} of it are activations, and {share}"


def describe_loading(plan: PlanReport, site: SiteForecast) -> str | None:
    """What a node's host holds until training begins, and the ways around; None where training holds as much."""
    loading, forecast = site.loading, site.best or find_closest(site.rungs)
    if loading is None or forecast is None:
        return None
    peak_bytes = max(loading.build_bytes, loading.init_bytes)
    host_bytes = forecast.memory["host"].limit_bytes or max(peak_bytes, _USUAL_HOST_BYTES)
    if peak_bytes - loading.later_bytes < WORTH_NAMING * host_bytes:
        return None
    form, ways = plan.source.form, list[str]()
    if loading.whole and loading.stage == 3:
        ways += [BUILT_BY_SCRIPT if form.runs_as_main else "--zero-init builds it in parts"]
    if loading.in_fp32 and (name := _TORCH_NAMES.get(site.site.precision)) is not None:
        prefix = "a model.py with " if form.is_model_config else ""
        ways += [f"{prefix}from_pretrained(dtype=torch.{name}): DeepSpeed trains from weights of that type anyway"]
    if loading.whole and loading.stage < 3 and loading.ranks > 1:
        ways += ["one rank at a time, which moves its model to its card before the next one begins"]
    sizes = [format_bytes(size) for size in (loading.build_bytes, loading.init_bytes, loading.later_bytes)]
    build = f"{loading.ranks} ranks build the model" if loading.ranks > 1 else "a rank builds the model"
    start = "their engines start" if loading.ranks > 1 else "its engine starts"
    held = f"{sizes[0]} while {build}, {sizes[1]} while {start}"
    needs = f"{forecast.rung}: the host of a node holds {held}, and {sizes[2]} in training"
    return "; ".join((needs, f"less at the start: {'; or '.join(ways)}" if ways else "")).removesuffix("; ")


def describe_need(rung: RungForecast) -> str:
    """'needs 36.1 GiB of device memory, 4.1 GiB more than there is'."""
    tier = find_fullest_tier(rung)
    if tier is None:
        device = rung.memory.get("device")
        return f"needs {format_bytes(device.peak_bytes)} of device memory" if device else rung.reason
    predicted = rung.memory[tier]
    missing = predicted.peak_bytes - (predicted.limit_bytes or 0)
    memory = f"{TIER_NAMES[tier]}{' on a node' if tier in TIERS_OF_A_NODE else ''}"
    return f"needs {format_bytes(predicted.peak_bytes)} of {memory}, {format_bytes(missing)} more than there is"


def find_fullest_tier(rung: RungForecast) -> Tier | None:
    """The tier that exceeds its limit by the largest share; None when none does."""
    over = [tier for tier, predicted in rung.memory.items() if predicted.fill > 1]
    return max(over, key=lambda tier: rung.memory[tier].fill, default=None)
