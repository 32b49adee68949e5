"""Simulate a rung of a plan once, and judge it for each machine."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..config.deepspeed import compose, get_key, start_settings
from ..config.strategies import Rung
from ..errors import InputError
from ..forecast.batch_search import MOST_MICRO_BATCH, Largest, largest
from ..forecast.simulator.client import SimulationFailed
from ..forecast.values import (
    Engine,
    EngineSpec,
    ForecastListener,
    RungFinished,
    RungForecast,
    Simulation,
    SimulationStarted,
    Simulator,
)
from ..forecast.verdict import judge_memory
from ..settings import PlanSettings, Site
from ..tuner.candidates import refusal_reason, why_not_forecast
from ..tuner.trials import accumulation_for, micro_batches
from ..types import Knobs, ModelFacts, Scalar, Tier

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


def holds_for(simulated: Simulation, ask: EngineSpec, device_bytes: int) -> bool:
    """Whether what was simulated for a larger device is right for this one too.

    DeepSpeed looks at the free memory once: stages 1 and 2 flatten the parameters on the device when they fit there
    (`stage_1_and_2.py`). Where init's peak stays below the smaller device they fit there, too. Where another phase
    needs more than the device has, the verdict is the same whatever init does.
    """
    if device_bytes >= ask.device_bytes or get_key(ask.ds_config, "zero_optimization.stage") not in (1, 2):
        return True
    peaks = {phase: tiers.get("device", 0) for phase, tiers in simulated.live_bytes.items()}
    return peaks.get("init", 0) <= device_bytes or any(
        peak > device_bytes for phase, peak in peaks.items() if phase != "init"
    )


def checkpointing_of(question: PlanSettings, facts: ModelFacts) -> bool:
    """Whether activations are recomputed. Raises InputError when that was asked for and the model cannot."""
    if question.checkpointing and not facts.checkpointing:
        raise InputError(
            "--checkpointing on: the model has no gradient_checkpointing_enable()",
            where=question.source.path,
            hint="drop the option, or give the model that method",
        )
    return facts.checkpointing if question.checkpointing is None else question.checkpointing


def ask_for(
    rung: Rung, site: Site, question: PlanSettings, facts: ModelFacts, sizing: Sizing
) -> EngineSpec | RungForecast:
    """The engine of a rung there, or why it does not apply."""
    reason = (
        site.problem
        or refusal_reason(rung, facts, site.world_size)
        or _why_not(rung, site, question)
        or why_not_forecast(facts)
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
    return EngineSpec(
        rung=rung.name,
        ds_config=config,
        world_size=site.world_size,
        ranks_per_node=site.ranks_per_node,
        device_bytes=sizing.device_bytes,
        device=question.device,
        checkpointing=knobs.checkpointing,
        zero_init=question.zero_init and rung.stage == 3,
    )


def _settings(rung: Rung, site: Site, question: PlanSettings, facts: ModelFacts, sizing: Sizing) -> dict[str, Scalar]:
    """Buckets and limits as a fit would start with them; as_written: DeepSpeed's own where the base config has none."""
    if not question.as_written:
        return start_settings(rung, base=site.base, device_bytes=sizing.buckets_bytes, facts=facts)
    needed = {key: sizing_of for key, sizing_of in rung.start.items() if sizing_of.device_share is None}
    values = {key: of.value(device_bytes=sizing.buckets_bytes, facts=facts) for key, of in needed.items()}
    return {key: value for key, value in values.items() if get_key(site.base, key) is None}


def overruled(ask: EngineSpec, base: Mapping[str, Any]) -> tuple[str, ...]:
    """Numbers of the base config's ZeRO section that the forecast's engine does not have, in sentences.

    As a fit does, it starts with buckets that suit the device.
    """
    ours = get_key(ask.ds_config, "zero_optimization") or {}
    users = {key: value for key, value in (get_key(base, "zero_optimization") or {}).items() if key != "stage"}
    return tuple(
        f"{ask.rung}: {key} {ours[key]:,}, as a fit would start, not the base config's {value:,.0f}"
        for key, value in users.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key in ours and ours[key] != value
    )


def on_site(ask: EngineSpec, site: Site) -> EngineSpec:
    """The same engine, as it stands on that machine."""
    return replace(ask, device_bytes=site.machine.device_bytes, ranks_per_node=site.ranks_per_node)


def limits_of(site: Site, question: PlanSettings) -> Mapping[Tier, int]:
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


def _why_not(rung: Rung, site: Site, question: PlanSettings) -> str | None:
    if rung.needs_nvme_path and site.nvme_path is None:
        return "no NVMe was named (--nvme 2TiB)"
    if question.device == "cpu" and site.precision == "fp16":
        return "CPU ranks have no fp16"
    return None


# What every rung would share: the workload or the installation has to be mended first.
_LASTING = ("user_code", "data_dependent", "unsupported", "stuck", "no_compiler", "build_failed")


@dataclass(slots=True)
class Work:
    """One plan under way. It may be used from several threads.

    seen: what was simulated already, by engine and micro batch. found: what is said, by machine and rung. expandable:
    torch's allocator has expandable segments, see `forecast.allocator`.
    """

    question: PlanSettings
    facts: ModelFacts
    simulator: Simulator
    listen: ForecastListener
    expandable: bool = False
    seen: dict[tuple[str, int], Simulation] = field(default_factory=dict)
    found: dict[tuple[str, str], RungForecast] = field(default_factory=dict)
    failures: list[SimulationFailed] = field(default_factory=list)
    sample_bytes: float | None = None  # on the device, as the last search found; rungs share their activations
    lock: threading.Lock = field(default_factory=threading.Lock)
    stopped: bool = False  # the simulator is about to go; whoever still works asks and says nothing any more

    def tell(self, site: Site, forecast: RungForecast) -> None:
        """Keep it and pass it on to whoever waits."""
        with self.lock:
            if self.stopped:
                return
            self.found[site.machine.name, forecast.rung] = forecast
            total = len(self.question.ladder) * len(self.question.sites)
            self.listen(RungFinished(machine=site.machine.name, forecast=forecast, done=len(self.found), total=total))

    def settled(self, site: Site) -> bool:
        """Whether a rung is known to fit there."""
        with self.lock:
            said = list(self.found.items())
        return any(machine == site.machine.name and forecast.verdict == "fits" for (machine, _), forecast in said)


def forecast_rung(work: Work, rung: Rung, sites: Sequence[Site], sizing: Sizing, *, search: bool) -> None:
    """Say of a rung what it needs on each site; sites share one sizing. search: and its largest micro batch.

    Raises SimulationFailed for what no rung would survive; what only this one does not is said of it.
    """
    own: list[tuple[Site, EngineSpec]] = []
    shared: list[tuple[Site, EngineSpec]] = []
    for site in sites:
        ask = ask_for(rung, site, work.question, work.facts, sizing)
        if isinstance(ask, EngineSpec):
            shared.append((site, ask))
        else:
            work.tell(site, ask)
    if shared:
        own = _on_one_engine(work, shared, search=search)
    for site, ask in own:
        _on_one_engine(work, [(site, on_site(ask, site))], search=search)


def _on_one_engine(
    work: Work, asked: Sequence[tuple[Site, EngineSpec]], *, search: bool
) -> list[tuple[Site, EngineSpec]]:
    """Forecast those for which the engine's device size makes no difference; the others come back."""
    left: list[tuple[Site, EngineSpec]] = []
    ask = asked[0][1]
    try:
        with _Measure(work, ask) as measure:
            for site, its in asked:
                if holds_for(measure(site.micro_batch), ask, site.machine.device_bytes):
                    _forecast_site(work, site, ask, measure, search=search)
                else:
                    left.append((site, its))
    except SimulationFailed as failed:
        if failed.kind in _LASTING:
            raise
        work.failures.append(failed)
        for site, its in asked:
            said = f"could not be simulated: {' '.join(str(failed.what).split())}"
            work.tell(site, _without(its, site, said))
    return left


def _forecast_site(work: Work, site: Site, ask: EngineSpec, measure: _Measure, *, search: bool) -> None:
    limits = limits_of(site, work.question)
    here = on_site(ask, site)

    def said_of(micro_batch: int) -> RungForecast:
        said = judge_memory(
            here, measure(micro_batch), limits=limits, emulated=here.device == "cpu", expandable=work.expandable
        )
        return replace(said, assumed=(*said.assumed, *overruled(ask, site.base)))

    forecast = said_of(site.micro_batch)
    if search and forecast.memory:
        work.tell(site, forecast)
        sizes = micro_batches(site.global_batch, site.world_size, MOST_MICRO_BATCH)
        first = (site.micro_batch, forecast.fill)
        slope = work.sample_bytes / site.machine.device_bytes if work.sample_bytes is not None else None
        beyond: dict[int, str] = {}  # why larger ones cannot be simulated: the data of a script may end, say

        def fill(size: int) -> float:
            try:
                return said_of(size).fill
            except SimulationFailed as failed:
                if work.stopped:
                    raise
                beyond[size] = f"{ask.rung}: micro batch {size} was not simulated: {' '.join(str(failed.what).split())}"
                return math.inf

        found = largest(fill, sizes, known=first, slope=slope)
        if found.slope is not None and math.isfinite(found.slope):
            work.sample_bytes = found.slope * site.machine.device_bytes
        forecast = _with_largest(forecast, found)
        if beyond:
            forecast = replace(forecast, assumed=(*forecast.assumed, beyond[min(beyond)]))
    work.tell(site, forecast)


def _with_largest(forecast: RungForecast, found: Largest) -> RungForecast:
    beyond = f"; {found.refused} does not fit, between them nothing was tried" if found.refused else ""
    said = () if found.proven else (f"{forecast.rung}: micro batch {found.micro_batch} fits{beyond}",)
    if found.micro_batch == MOST_MICRO_BATCH:
        said = (*said, f"no micro batch above {MOST_MICRO_BATCH} was looked at: more may fit")
    return replace(forecast, largest_micro_batch=found.micro_batch, assumed=(*forecast.assumed, *said))


def _without(ask: EngineSpec, site: Site, reason: str) -> RungForecast:
    return RungForecast(rung=ask.rung, verdict="not_applicable", reason=reason, micro_batch=site.micro_batch)


class _Measure:
    """Micro batch → what is simulated, on one engine that is started when something new is asked."""

    def __init__(self, work: Work, ask: EngineSpec) -> None:
        self._work, self._ask = work, ask
        self._key = json.dumps(asdict(ask), sort_keys=True, default=str)
        self._context: AbstractContextManager[Engine] | None = None
        self._engine: Engine | None = None

    def __enter__(self) -> _Measure:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._context is not None:
            self._context.__exit__(None, None, None)

    def __call__(self, micro_batch: int) -> Simulation:
        seen = self._work.seen.get((self._key, micro_batch))
        if seen is None:
            if self._work.stopped:
                raise SimulationFailed(kind="crashed", what="stopped")
            self._work.listen(SimulationStarted(rung=self._ask.rung, micro_batch=micro_batch))
            if self._engine is None:
                context = self._work.simulator.engine(self._ask)
                self._engine, self._context = context.__enter__(), context
            seen = self._work.seen[self._key, micro_batch] = self._engine.measure(micro_batch)
        return seen
