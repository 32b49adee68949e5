"""From a question to the engines that have to be simulated, and no more of them than that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .ds_config import compose, get, start_settings
from .errors import InputError
from .forecast.values import Ask, RungForecast, Simulated
from .ladder import Rung
from .outcomes import Tier
from .question import Question, Site
from .search.applies import refusal_of, unforeseeable
from .search.ask import accumulation_for
from .values import Knobs, ModelFacts, Scalar

_ENOUGH_ACCUMULATION = 2  # more repeats the second micro batch, the first that runs beside kept gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """Device bytes by which a rung's buckets are sized, and which DeepSpeed sees at init."""

    buckets_bytes: int
    device_bytes: int


def groups_of(sites: tuple[Site, ...]) -> tuple[tuple[Sizing, tuple[Site, ...]], ...]:
    """Sites that share simulations: those with the same ranks, batch and config.

    Buckets are sized by the smallest device, which suits the larger ones; DeepSpeed sees the largest, see `holds_for`.
    """
    groups: dict[str, list[Site]] = {}
    for site in sites:
        groups.setdefault(repr((site.world_size, site.micro_batch, site.base, site.problem)), []).append(site)
    return tuple((_shared(group), tuple(group)) for group in groups.values())


def holds_for(simulated: Simulated, ask: Ask, device_bytes: int) -> bool:
    """Whether what was simulated for a larger device is right for this one too.

    DeepSpeed looks at the free memory once: stages 1 and 2 flatten the parameters on the device when they fit there
    (`stage_1_and_2.py`). Where init's peak stays below the smaller device they fit there, too. Where another phase
    needs more than the device has, the verdict is the same whatever init does.
    """
    if device_bytes >= ask.device_bytes or get(ask.ds_config, "zero_optimization.stage") not in (1, 2):
        return True
    peaks = {phase: tiers.get("device", 0) for phase, tiers in simulated.live_bytes.items()}
    return peaks.get("init", 0) <= device_bytes or any(
        peak > device_bytes for phase, peak in peaks.items() if phase != "init"
    )


def checkpointing_of(question: Question, facts: ModelFacts) -> bool:
    """Whether activations are recomputed. Raises InputError when that was asked for and the model cannot."""
    if question.checkpointing and not facts.checkpointing:
        raise InputError(
            "--checkpointing on: the model has no gradient_checkpointing_enable()",
            where=question.source.path,
            mend="drop the option, or give the model that method",
        )
    return facts.checkpointing if question.checkpointing is None else question.checkpointing


def ask_for(rung: Rung, site: Site, question: Question, facts: ModelFacts, sizing: Sizing) -> Ask | RungForecast:
    """The engine of a rung there, or why it does not apply."""
    reason = (
        site.problem
        or refusal_of(rung, facts, site.world_size)
        or _why_not(rung, site, question)
        or unforeseeable(facts)
    )
    if reason is not None:
        return RungForecast(rung=rung.name, verdict="not_applicable", reason=reason, micro_batch=site.micro_batch)
    knobs = Knobs(
        micro_batch=site.micro_batch,
        accumulation=min(_ENOUGH_ACCUMULATION, _accumulation(site)),
        checkpointing=checkpointing_of(question, facts),
        settings=_settings(rung, site, question, facts, sizing),
    )
    config = compose(
        rung,
        knobs,
        base=site.base,
        world_size=site.world_size,
        own_optimizer=facts.has_optimizer,
        nvme_path=site.nvme_path,
    )
    return Ask(
        rung=rung.name,
        ds_config=config,
        world_size=site.world_size,
        ranks_per_node=site.ranks_per_node,
        device_bytes=sizing.device_bytes,
        device=question.device,
        checkpointing=knobs.checkpointing,
        zero_init=question.zero_init and rung.stage == 3,
    )


def _settings(rung: Rung, site: Site, question: Question, facts: ModelFacts, sizing: Sizing) -> dict[str, Scalar]:
    """Buckets and limits as a fit would start with them; as_written: DeepSpeed's own where the base config has none."""
    if not question.as_written:
        return start_settings(rung, base=site.base, device_bytes=sizing.buckets_bytes, facts=facts)
    needed = {key: sizing_of for key, sizing_of in rung.start.items() if sizing_of.device_share is None}
    values = {key: of.value(device_bytes=sizing.buckets_bytes, facts=facts) for key, of in needed.items()}
    return {key: value for key, value in values.items() if get(site.base, key) is None}


def overruled(ask: Ask, base: Mapping[str, Any]) -> tuple[str, ...]:
    """Numbers of the base config's ZeRO section that the forecast's engine does not have, in sentences.

    As a fit does, it starts with buckets that suit the device.
    """
    ours = get(ask.ds_config, "zero_optimization") or {}
    users = {key: value for key, value in (get(base, "zero_optimization") or {}).items() if key != "stage"}
    return tuple(
        f"{ask.rung}: {key} {ours[key]:,}, as a fit would start, not the base config's {value:,.0f}"
        for key, value in users.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key in ours and ours[key] != value
    )


def on_site(ask: Ask, site: Site) -> Ask:
    """The same engine, as it stands on that machine."""
    return replace(ask, device_bytes=site.machine.device_bytes, ranks_per_node=site.ranks_per_node)


def limits_of(site: Site, question: Question) -> Mapping[Tier, int]:
    """Bytes, where they are known: the device a rank, host and NVMe a node. CPU ranks' budgets are the host's limit."""
    limits: dict[Tier, int] = {"device": site.machine.device_bytes}
    if question.device == "cuda" and site.machine.host_bytes is not None:
        limits["host"] = site.machine.host_bytes
    if site.machine.nvme_bytes is not None:
        limits["nvme"] = site.machine.nvme_bytes
    return limits


def _shared(sites: list[Site]) -> Sizing:
    sizes = [site.machine.device_bytes for site in sites]
    return Sizing(buckets_bytes=min(sizes), device_bytes=max(sizes))


def _accumulation(site: Site) -> int:
    users = site.base.get("gradient_accumulation_steps")
    if site.global_batch is None and isinstance(users, int):
        return users
    return accumulation_for(site.global_batch, site.micro_batch, site.world_size)


def _why_not(rung: Rung, site: Site, question: Question) -> str | None:
    if rung.needs_nvme_path and site.nvme_path is None:
        return "no NVMe was named (--nvme 2TiB)"
    if question.device == "cpu" and site.precision == "fp16":
        return "CPU ranks have no fp16"
    return None
