"""`autods explain`: what each key of a DeepSpeed config means and costs, and what is wrong with the config."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..config.base_config import check_ranks, copy_as_json, fills_in_auto, read_base_config
from ..config.batch_rules import complete_batch
from ..config.catalogue import Site
from ..config.deepspeed import (
    BATCH_KEYS,
    choose_accumulation,
    count_replicas,
    documented_name,
    get_key,
    leave_out_auto,
    merge,
    nest_key,
    read_known_keys,
    use_documented_names,
)
from ..config.key_rules import find_ignored
from ..config.plan_settings import PlanSettings, list_but_batch, resolve_plan
from ..config.problems import InstalledKeys, Problem, Question, find_problems, is_count, walk_keys
from ..config.rungs import Rung, State
from ..config.validator import EXPLAIN_RULES
from ..devices import find_device
from ..errors import InputError
from ..forecast.values import BUILT_BY_SCRIPT, ForecastListener, RungForecast, StartSimulator
from ..planner.plan import list_assumptions, plan
from ..report.results.explain import ExplainedKey, Explanation, KeyCost, NeededMemory
from ..report.results.plan import AnswerSoFar, PlanEvent, PlanReport
from ..requests import ExplainRequest, PlanRequest
from ..schema import read_toml_as
from ..system.host import Hardware, data_folder
from ..types import TIERS, Tier, WorkloadSource
from ..units import format_bytes
from .installed import ask_deepspeed
from .toy_engine import find_refusals

_CONFIG = "this config"
# Keys whose bytes the simulated engine can show: beside a tenth of the value, or the opposite of a switch.
_SIZED = (
    "reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "sub_group_size", "overlap_comm", "contiguous_gradients",
    "offload_param.pin_memory", "offload_param.buffer_count", "offload_param.buffer_size",
    "offload_optimizer.pin_memory", "offload_optimizer.buffer_count",
)  # fmt: skip
_SPLIT_BY_STAGE: Mapping[int, tuple[State, ...]] = {
    0: (), 1: ("optimizer",), 2: ("optimizer", "gradients"), 3: ("optimizer", "gradients", "parameters"),
}  # fmt: skip
_TIER_OF: Mapping[str, Tier] = {"cpu": "host", "nvme": "nvme"}
_OLD_SWITCHES = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainSettings:
    """The config to explain, and its name. `plan` has workload and machine, if bytes are asked for."""

    name: str
    config: Mapping[str, Any]
    ranks: int | None = None
    plan: PlanSettings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Meanings:
    """Texts by dotted key, from `configs/deepspeed/meanings.toml`."""

    means: Mapping[str, str] = field(default_factory=dict)
    costs: Mapping[str, str] = field(default_factory=dict)


def resolve_explain(
    request: ExplainRequest, make_source: Callable[[PlanRequest], WorkloadSource], *, hardware: Hardware
) -> ExplainSettings:
    """Read the config, the workload and its machine. Raises InputError.

    A config may be wrong in every way that can be explained; only a file that is no JSON object is refused.
    """
    if isinstance(request.config, Mapping):
        name, config = "config", copy_as_json(request.config, "config")
    else:
        name, config = str(request.config), read_base_config(Path(request.config))
    if request.workload is None:
        _check_needs_no_workload(request)
        ranks = None if request.gpus is None else check_ranks(request.gpus)
        return ExplainSettings(name=name, config=config, ranks=ranks)
    shared = {each.name for each in fields(PlanRequest)} & {each.name for each in fields(ExplainRequest)}
    options = {name: getattr(request, name) for name in shared}
    micro = config.get("train_micro_batch_size_per_gpu")
    own_micro = micro if is_count(micro) else None  # a wrong value is explained
    options |= {
        "workload": os.fspath(request.workload),
        "micro_batch": own_micro if request.micro_batch is None else request.micro_batch,
    }
    without_batch = {key: value for key, value in config.items() if key not in BATCH_KEYS}
    question = PlanRequest(**options, base_config=without_batch, as_written=True, largest=False)
    source = make_source(question)
    if not fills_in_auto(source):
        question = replace(question, base_config=leave_out_auto(without_batch))
    settings = resolve_plan(question, source, hardware=hardware)
    if len(settings.sites) > 1:
        raise InputError("a config is explained on one machine", place=f"--on {request.on}", hint="name one")
    site = _give_batch(settings.sites[0], config, request.micro_batch, settings.source)
    settings = replace(settings, sites=(site,), assumed=list_but_batch(settings))
    return ExplainSettings(name=name, config=config, ranks=site.world_size, plan=settings)


def _give_batch(site: Site, config: Mapping[str, Any], micro_batch: int | None, source: WorkloadSource) -> Site:
    """Return the site with the batch that DeepSpeed completes from the config, or from it with this micro batch.

    Sizes that are wrong are explained, and change nothing here. A script has the accumulation that it asks for.
    """
    total_key, micro_key, _ = BATCH_KEYS
    batch = complete_batch(config, site.world_size)
    if micro_batch is not None:
        with_micro = {**config, micro_key: micro_batch}
        batch = complete_batch(with_micro, site.world_size)
        batch = batch or complete_batch({**with_micro, total_key: None}, site.world_size)
    if batch is None:
        return site
    micro, accumulation = batch
    total = micro * accumulation * count_replicas(config, site.world_size)
    return replace(site, micro_batch=micro, global_batch=None if source.form.runs_as_main else total)


def _check_needs_no_workload(request: ExplainRequest) -> None:
    """Raises InputError for an option that only says something about a workload."""
    for each in fields(request):
        if each.name not in ("config", "gpus", "on_event") and getattr(request, each.name) != each.default:
            option = "-- ARGS" if each.name == "script_args" else f"--{each.name.replace('_', '-')}"
            hint = "name the workload after the config, or leave the option out"
            raise InputError(f"{option} has no effect without a workload", hint=hint)


def explain(settings: ExplainSettings, listen: ForecastListener, start: StartSimulator | None = None) -> Explanation:
    """Explain each key, judge the config, and simulate it where a workload is given.

    Raises InputError when the workload is at fault, EnvironmentBroken when it cannot be simulated here.
    """
    with ThreadPoolExecutor(1) as pool:  # each takes seconds
        answer = pool.submit(ask_deepspeed, settings.config)
        refusals = find_refusals(settings.config, settings.ranks)
        installed = answer.result()
    on_cpu = settings.plan is not None and not find_device(settings.plan.device).has_cards
    question = Question(config=settings.config, installed=installed, ranks=settings.ranks, on_cpu=on_cpu)
    problems = find_problems(question, EXPLAIN_RULES)
    if not any(problem.severity == "error" for problem in problems):  # they say it better
        problems = (*refusals, *problems)
    memory, costs = None, dict[str, KeyCost]()
    if settings.plan is not None and not any(problem.severity == "error" for problem in problems):
        memory, costs, loading = _simulate(settings.config, settings.plan, listen, start)
        problems = (*problems, *loading)
    return Explanation(
        config=settings.name,
        deepspeed=installed.version,
        keys=tuple(_explain_keys(settings.config, installed, costs, find_ignored(question))),
        findings=problems,
        memory=memory,
    )


def read_meanings() -> Meanings:
    """Read the texts that ship with the package."""
    return read_toml_as(Meanings, data_folder("configs") / "deepspeed" / "meanings.toml", name="list of texts")


def _explain_keys(
    config: Mapping[str, Any], installed: InstalledKeys, costs: Mapping[str, KeyCost], ignored: frozenset[str]
) -> Iterator[ExplainedKey]:
    texts, defaults = read_meanings(), installed.defaults
    names = {"optimizers": ", ".join(installed.optimizers), "schedules": ", ".join(installed.schedules)}
    for name, value in walk_keys(config):
        section, _, last = name.rpartition(".")
        documented = f"{section}.{documented_name(last)}" if section == "zero_optimization" else name
        documented = documented.replace("bfloat16.", "bf16.")  # its old name
        meaning = texts.means.get(documented, "").format(**names)
        if not ignored.isdisjoint(accumulate(name.split("."), "{}.{}".format)):  # it, or a section around it
            meaning = "DeepSpeed ignores it."
        yield ExplainedKey(
            key=name,
            value=value,
            default=defaults.get(name),
            has_default=defaults.get(name) is not None,
            meaning=meaning,
            cost=texts.costs.get(documented, ""),
            measured=costs.get(name),
        )


def _simulate(
    config: Mapping[str, Any], settings: PlanSettings, listen: ForecastListener, start: StartSimulator | None
) -> tuple[NeededMemory, dict[str, KeyCost], tuple[Problem, ...]]:
    """Simulate the config, and once more for each sized key with another value of it. A model that is loaded whole is a
    problem.

    Each is a rung of a plan, so that they share one simulated device.
    """
    others = {f"with {name.rpartition('.')[2]} {value}": (name, value) for name, value in _other_values(config)}
    rungs = [make_rung(_CONFIG, config)]
    rungs += [make_rung(label, merge(config, nest_key(name, value))) for label, (name, value) in others.items()]

    def tell(event: PlanEvent) -> None:
        if not isinstance(event, AnswerSoFar):  # the rungs are one config and variants of it, not a choice
            listen(event)

    forecast = plan(replace(settings, ladder=tuple(rungs)), listen=tell, start=start)
    by_rung = {each.rung: each for each in forecast.sites[0].rungs}
    whole = by_rung[_CONFIG]
    costs = {
        name: KeyCost(instead=value, tiers=_difference(whole, by_rung[label]))
        for label, (name, value) in others.items()
        if whole.memory and by_rung[label].memory
    }
    site = settings.sites[0]
    memory = NeededMemory(
        workload=settings.source.name,
        ranks=site.world_size,
        micro_batch=whole.micro_batch,
        accumulation=choose_accumulation(site, whole.micro_batch, settings.source.form),
        verdict=whole.verdict,
        reason=whole.reason,
        tiers={tier: held.peak_bytes for tier, held in whole.memory.items()},
        limits={tier: held.limit_bytes for tier, held in whole.memory.items() if held.limit_bytes is not None},
        assumed=list_assumptions(
            settings.assumed, settings.source, forecast.facts, [replace(forecast.sites[0], rungs=(whole,))]
        ),
    )
    return memory, costs, tuple(_find_whole_load(forecast))


def _find_whole_load(forecast: PlanReport) -> Iterator[Problem]:
    """A script of stage 3 whose ranks each load the whole model, and hold most host memory then."""
    site = forecast.sites[0]
    loading, ranks = site.loading, site.site.world_size
    if loading is None or not loading.whole or loading.stage < 3 or ranks < 2 or not forecast.source.form.runs_as_main:
        return
    held = (
        f"a node's host holds {format_bytes(loading.build_bytes)} then, and {format_bytes(loading.later_bytes)} later"
    )
    problem = f"stage 3 splits the parameters, but each rank loads all of them first: {held}"
    yield Problem(severity="warning", key="zero_optimization.stage", problem=problem, hint=BUILT_BY_SCRIPT)


def make_rung(name: str, config: Mapping[str, Any]) -> Rung:
    """A rung of the ladder that is this config: its stage, its offloads, and all of its ZeRO section."""
    named = use_documented_names(config)
    zero = _replace_old_switches(Question(config=named).zero)
    question = Question(config={**named, "zero_optimization": zero})
    stage = question.stage
    devices = {part: question.offload_device(part) for part in ("param", "optimizer")}
    optimizer = _TIER_OF.get(devices["optimizer"], "device")
    return Rung(
        name=name,
        order=0,
        title=name,
        stage=stage,
        shards=_SPLIT_BY_STAGE[stage],
        places={
            "parameters": _TIER_OF.get(devices["param"], "device"),
            "gradients": optimizer if stage > 0 else "device",  # stages 1 and 2 are one optimizer: it keeps both there
            "optimizer": optimizer,
        },
        ds_config={"zero_optimization": zero, **({"aio": config["aio"]} if "aio" in config else {})},
    )


def _replace_old_switches(zero: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section with the offloads that DeepSpeed reads from its old switches; it refuses both together."""
    switched = (new for old, new in _OLD_SWITCHES.items() if zero.get(old) is True and new not in zero)
    offloads = {new: {"device": "cpu"} for new in switched}
    return {key: value for key, value in zero.items() if _OLD_SWITCHES.get(key) not in offloads} | offloads


def _other_values(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted key, another value) for each sized key of the config that its stage obeys."""
    stages, stage = read_known_keys().zero_optimization, Question(config=config).stage
    for key in _SIZED:
        name = f"zero_optimization.{key}"
        value = get_key(config, name)
        if stage not in stages.get(key, (0, 1, 2, 3)):
            continue
        if isinstance(value, bool):
            yield name, not value
        elif isinstance(value, int | float) and value >= 10:
            yield name, int(value) // 10
        elif isinstance(value, int) and value > 1:
            yield name, 1


def _difference(forecast: RungForecast, other: RungForecast) -> dict[Tier, int]:
    """The bytes by which each tier's peak is larger than the other's; tiers without a difference are left out."""
    grown: dict[Tier, int] = {}
    for tier in TIERS:
        here, there = (each.memory[tier].peak_bytes if tier in each.memory else 0 for each in (forecast, other))
        if here != there:
            grown[tier] = here - there
    return grown
