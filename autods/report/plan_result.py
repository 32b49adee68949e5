"""A forecast, as a value and as JSON by the contract of `autods plan … --json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..forecast.values import PHASES, Predicted, RungForecast
from ..outcomes import Tier
from ..question import Site
from ..values import Device, ModelFacts, WorkloadSource

Status = Literal["fits", "tight", "nothing_fits", "not_forecast"]

_NOTHING = Predicted(peak_bytes=0, low_bytes=0, high_bytes=0)
_PER_NODE: tuple[Tier, ...] = ("host", "nvme")


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteForecast:
    """What is said of the rungs on one kind of machine, fastest first.

    to_try: those that could not be forecast and may fit; a fit tries them.
    """

    site: Site
    rungs: tuple[RungForecast, ...]
    to_try: tuple[str, ...] = ()

    @property
    def best(self) -> RungForecast | None:
        """The fastest rung that fits, else the fastest that may."""
        by_verdict = [[rung for rung in self.rungs if rung.verdict == verdict] for verdict in ("fits", "tight")]
        return next((rungs[0] for rungs in by_verdict if rungs), None)

    @property
    def best_rung(self) -> str | None:
        """Its name."""
        return self.best.rung if self.best else None

    @property
    def status(self) -> Status:
        """Whether anything fits."""
        if self.best is None:
            return "not_forecast" if self.to_try else "nothing_fits"
        return "fits" if self.best.verdict == "fits" else "tight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a plan found, machine by machine, smallest device first.

    assumed: what nobody said and the answer depends on, in sentences; each rung adds its own. zero_init: stage 3 was
    built under `deepspeed.zero.Init`.
    """

    sites: tuple[SiteForecast, ...]
    source: WorkloadSource
    facts: ModelFacts
    device: Device = "cuda"
    checkpointing: bool = True
    zero_init: bool = False
    assumed: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def status(self) -> Status:
        """The best of all machines."""
        found = {site.status for site in self.sites}
        order: tuple[Status, ...] = ("fits", "tight", "not_forecast")
        return next((status for status in order if status in found), "nothing_fits")

    @property
    def all_assumed(self) -> tuple[str, ...]:
        """Once each, the plan's own first."""
        own = (said for site in self.sites for rung in site.rungs for said in rung.assumed)
        return tuple(dict.fromkeys((*self.assumed, *_of_workload(self), *own)))


def to_dict(forecast: Forecast) -> dict[str, Any]:
    """Plain JSON values. One machine: its rungs at the top; several: each in `machines`."""
    common = {
        "status": forecast.status,
        "workload": _workload(forecast),
        "assumed": list(forecast.all_assumed),
        "versions": dict(forecast.versions),
        "seconds": round(forecast.seconds, 3),
    }
    if len(forecast.sites) == 1:
        return {**_site(forecast.sites[0]), **common}
    return {"machines": [_site(site) for site in forecast.sites], **common}


def _site(said: SiteForecast) -> dict[str, Any]:
    site = said.site
    hardware = {
        **asdict(site.machine),
        "world_size": site.world_size,
        "nodes": site.nodes,
        "ranks_per_node": site.ranks_per_node,
        "precision": site.precision,
        "micro_batch": site.micro_batch,
    }
    rungs = [rung_to_dict(rung, site.ranks_per_node) for rung in said.rungs]
    return {"status": said.status, "best": said.best_rung, "rungs": rungs, "hardware": hardware}


def rung_to_dict(rung: RungForecast, ranks_per_node: int) -> dict[str, Any]:
    """Bytes per rank; of host and NVMe per node, too. Every tier is null where nothing was forecast."""
    row: dict[str, Any] = {
        "rung": rung.rung,
        "verdict": rung.verdict,
        "reason": rung.reason,
        "micro_batch": rung.micro_batch,
        "largest_micro_batch": rung.largest_micro_batch,
        "decides": rung.decides,
        "exact": rung.exact,
        "assumed": list(rung.assumed),
        "seconds": round(rung.seconds, 3),
    }
    tiers: tuple[Tier, ...] = ("device", "host", "pinned", "nvme")
    for tier in tiers:
        row[tier] = _tier(rung, tier, ranks_per_node) if rung.memory else None
    return row


def _tier(rung: RungForecast, tier: Tier, ranks_per_node: int) -> dict[str, Any]:
    said = rung.memory.get(tier, _NOTHING)
    sizes = {"peak_bytes": said.peak_bytes, "low_bytes": said.low_bytes, "high_bytes": said.high_bytes}
    limit = {"limit_bytes": said.limit_bytes}
    if tier in _PER_NODE:
        each = {name: -(-size // ranks_per_node) for name, size in sizes.items()}
        return {**each, "node": {**sizes, **limit}}
    if tier == "pinned":
        return {**sizes, "node": {name: size * ranks_per_node for name, size in sizes.items()}}
    return {
        **sizes,
        **limit,
        "live_peak_bytes": rung.live_peak_bytes,
        "by_phase": {phase: rung.by_phase.get(phase, 0) for phase in PHASES},
        "breakdown": dict(rung.breakdown),
    }


def _workload(forecast: Forecast) -> dict[str, Any]:
    source, facts = forecast.source, forecast.facts
    return {
        "name": source.name,
        "kind": source.kind,
        "path": source.path,
        "task": source.task,
        "seq_len": facts.tokens_per_sample,
        "target_len": source.target_len,
        "checkpointing": forecast.checkpointing,
        "zero_init": forecast.zero_init,
        "device": forecast.device,
        **{name: value for name, value in asdict(facts).items() if name not in ("checkpointing", "tokens_per_sample")},
        "can_checkpoint": facts.checkpointing,
    }


def _of_workload(forecast: Forecast) -> list[str]:
    """What a workload's own defaults decide."""
    source, facts = forecast.source, forecast.facts
    said = []
    if source.seq_len is None and facts.tokens_per_sample is not None:
        why = "as build_batch makes them" if source.kind != "hf_config" else "the config's longest, at most 2048"
        said.append(f"sequences of {facts.tokens_per_sample} tokens, {why} (--seq-len)")
    if source.kind == "hf_config":
        said.append(f"task {source.task} (--task), random weights built in fp32")
    if not facts.checkpointing and source.kind != "script":  # a script's own affair
        said.append("no gradient checkpointing: the model has no gradient_checkpointing_enable()")
    return said
