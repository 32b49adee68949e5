"""Simulate each rung of a plan once, and judge it on each machine."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..config.catalogue import Machine, Site
from ..config.checkpointing import INPUTS_ON_HOST, State, may_offload, set_state, why_impossible
from ..config.deepspeed import choose_accumulation, count_replicas, get_key, micro_batches, start_settings
from ..config.plan_settings import PlanSettings
from ..config.rungs import Rung, unmet_need
from ..devices.base import EXPANDABLE
from ..errors import InputError
from ..forecast.attention import FLASH_FROM, find_family
from ..forecast.largest_batch import MOST_MICRO_BATCH, LargestMicroBatch
from ..forecast.predict.memory_model import estimate_outside_bytes
from ..forecast.predict.step_time import Speed
from ..forecast.predict.verdict import forecast_speed, is_surer, may_fit_offloaded
from ..forecast.simulate.protocol import SimulationFailed
from ..forecast.simulation_cache import (
    CachedEngine,
    SimulationCache,
    make_engine,
    move_engine,
    offload_inputs,
    why_not_forecast,
)
from ..forecast.values import (
    STARTING,
    EngineSpec,
    RungFinished,
    RungForecast,
    Simulation,
    SimulationStarted,
    Simulator,
)
from ..report.results.plan import PlanListener
from ..types import Knobs, ModelFacts, first_line

# Failures that every rung would share: the workload or the installation has to be mended first.
_LASTING = ("user_code", "data_dependent", "unsupported", "stuck", "no_compiler", "build_failed", "environment")


_ON_HOST = "{}: the inputs of its layers wait on the host (--checkpointing offload), which a fit sets"

SiteGroup = tuple[Site, ...]  # sites that share simulations


def group_sites(sites: Sequence[Site]) -> tuple[SiteGroup, ...]:
    """Group the sites with the same ranks, batch and config, and flash attention or none."""
    groups: dict[str, list[Site]] = {}
    for site in sites:
        flash = find_family(site.machine.capability) >= FLASH_FROM
        groups.setdefault(repr((site.world_size, site.micro_batch, site.base, site.problem, flash)), []).append(site)
    return tuple(map(tuple, groups.values()))


def holds_on(simulation: Simulation, spec: EngineSpec, machine: Machine) -> bool:
    """Return whether a simulation for another device, of at least the size, is right for this machine's, too.

    A card of another family may take another kernel of attention.

    DeepSpeed looks at the free memory once: stages 1 and 2 flatten the parameters on the device when they fit there
    (`stage_1_and_2.py`). Where init's peak stays below the smaller device they fit there, too. Where another phase
    needs more than the device has, the verdict is the same whatever init does.
    """
    device_bytes = machine.device_bytes
    if find_family(machine.capability) not in simulation.families:
        return False
    if device_bytes >= spec.device_bytes or get_key(spec.ds_config, "zero_optimization.stage") not in (1, 2):
        return True
    peaks = {phase: tiers.get("device", 0) for phase, tiers in simulation.live_bytes.items()}
    starting_bytes = max(peaks.get(phase, 0) for phase in STARTING)
    return starting_bytes <= device_bytes - estimate_outside_bytes(spec) or any(
        peak > device_bytes for phase, peak in peaks.items() if phase not in STARTING
    )


def choose_checkpointing(settings: PlanSettings, facts: ModelFacts) -> State:
    """Return whether activations are recomputed. Raises InputError when the model cannot although it should."""
    if settings.checkpointing is None:
        return "on" if facts.checkpointing else "off"
    if (reason := why_impossible(settings.checkpointing, facts, settings.source.form)) is not None:
        hint = "drop the option" if facts.checkpointing else "drop the option, or give the model that method"
        raise InputError(f"--checkpointing {settings.checkpointing}: {reason}", place=settings.source.path, hint=hint)
    return settings.checkpointing


def make_group_engine(
    rung: Rung, site: Site, settings: PlanSettings, facts: ModelFacts, group: SiteGroup
) -> EngineSpec | RungForecast:
    """Return the engine of a rung at a site, or a forecast that says why the rung does not apply.

    Buckets are sized for the smallest device of the group, which suits the larger ones. DeepSpeed sees the largest
    device at init, see `holds_on`.
    """
    reason = site.problem or unmet_need(rung, site, facts) or why_not_forecast(facts)
    if reason is not None:
        return _not_applicable(rung.name, site, reason)
    device_bytes = [each.machine.device_bytes for each in group]
    knobs = Knobs(
        micro_batch=site.micro_batch,
        accumulation=choose_accumulation(site, site.micro_batch, settings.source.form),
        settings=start_settings(
            rung, base=site.base, device_bytes=min(device_bytes), facts=facts, as_written=settings.as_written
        ),
    )
    knobs = set_state(knobs, choose_checkpointing(settings, facts))
    spec = make_engine(site, rung, knobs, facts, zero_init=settings.zero_init)
    return replace(move_engine(spec, group[0]), device_bytes=max(device_bytes))


def _not_applicable(rung: str, site: Site, reason: str) -> RungForecast:
    return RungForecast(rung=rung, verdict="not_applicable", reason=reason, micro_batch=site.micro_batch)


def list_overruled(spec: EngineSpec, base: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a sentence for each number of the base config's ZeRO section that the engine does not have.

    The engine starts with buckets that suit the device, as a fit does.
    """
    started = get_key(spec.ds_config, "zero_optimization") or {}
    given = {key: value for key, value in (get_key(base, "zero_optimization") or {}).items() if key != "stage"}
    return tuple(
        f"{spec.rung}: {key} {started[key]:,}, as a fit would start, not the base config's {value:,.0f}"
        for key, value in given.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key in started and started[key] != value
    )


class _Stopped(Exception):
    """The plan has ended, and its simulator with it."""


@dataclass(slots=True)
class PlanRun:
    """A plan that is under way. Several threads may forecast rungs at a time."""

    settings: PlanSettings
    facts: ModelFacts
    simulator: Simulator
    listen: PlanListener
    expandable: bool | None = False  # see `SimulationCache`
    forecasts: dict[tuple[str, str], RungForecast] = field(default_factory=dict)  # by machine and rung
    failures: dict[str, SimulationFailed] = field(default_factory=dict)  # by rung
    stopped: bool = False  # nothing is simulated or reported any more
    _lock: threading.Lock = field(default_factory=threading.Lock)
    cache: SimulationCache = field(init=False)

    def __post_init__(self) -> None:
        self.cache = SimulationCache(self.simulator, self.expandable, self._before_simulation)

    def list_forecasts(self, site: Site) -> tuple[RungForecast, ...]:
        """Return the forecasts at a site, fastest rung first.

        A comparison of machines ends each list with the first rung that fits. Whether a further rung was forecast
        meanwhile depends on the time that simulations take, and the plan must not.
        """
        with self._lock:
            known = [self.forecasts.get((site.machine.name, rung.name)) for rung in self.settings.ladder]
        forecasts = [forecast for forecast in known if forecast is not None]
        if len(self.settings.sites) > 1:
            verdicts = [forecast.verdict for forecast in forecasts]
            forecasts = forecasts[: verdicts.index("fits") + 1] if "fits" in verdicts else forecasts
        return tuple(forecasts)

    def forecast_rung(self, rung: Rung, sites: Sequence[Site], group: SiteGroup, *, search: bool) -> None:
        """Forecast a rung on sites of one group; with `search`, find its largest micro batch there, too.

        A failure that concerns this rung alone is its forecast. Raises SimulationFailed for others.
        """
        shared, applicable = None, []
        for site in sites:
            spec = make_group_engine(rung, site, self.settings, self.facts, group)
            if isinstance(spec, EngineSpec):
                shared = spec
                applicable.append(site)
            else:
                self._report(site, spec)
        if shared is not None:
            self._forecast_on_engines(shared, applicable, search=search)
            known = ((site, self.forecasts.get((site.machine.name, rung.name))) for site in applicable)
            if self.chooses_offload(shared) and (full := [site for site, each in known if may_fit_offloaded(each)]):
                self._forecast_on_engines(offload_inputs(shared), full, search=search)

    def _forecast_on_engines(self, shared: EngineSpec, sites: Sequence[Site], *, search: bool) -> None:
        """Forecast the sites on the engine that they share, and those for which it is not right on their own."""
        for site in self._forecast_on_one_engine(shared, sites, search=search):
            self._forecast_on_one_engine(move_engine(shared, site), [site], search=search)

    def chooses_offload(self, spec: EngineSpec) -> bool:
        """Whether the host may have the inputs of the engine's layers, and neither options nor base config say so."""
        settings, knobs = self.settings, Knobs(checkpointing=spec.checkpointing)
        if settings.checkpointing is not None or get_key(settings.sites[0].base, INPUTS_ON_HOST) is not None:
            return False
        return may_offload(knobs, settings.source.form, spec.device)

    def _forecast_on_one_engine(self, spec: EngineSpec, sites: Sequence[Site], *, search: bool) -> list[Site]:
        """Forecast the sites for which this engine is right. Returns those that need an engine of their own."""
        others = []
        try:
            with self.cache.open(spec) as engine:
                for site in sites:
                    simulation = engine.simulate(site.micro_batch)
                    if not holds_on(simulation, spec, site.machine):
                        others.append(site)
                        continue
                    forecast = self.forecast_at(site, engine, site.micro_batch)
                    if forecast.offloads_inputs and self.chooses_offload(spec):
                        if not is_surer(forecast, self.forecasts[site.machine.name, spec.rung]):
                            continue
                        forecast = replace(forecast, assumed=(*forecast.assumed, _ON_HOST.format(spec.rung)))
                    forecast = replace(forecast, assumed=(*forecast.assumed, *list_overruled(spec, site.base)))
                    self._report(site, forecast)
                    if not search or not forecast.memory:
                        continue
                    largest = self.find_largest(site, engine, forecast)
                    if largest.micro_batch is not None:
                        speed = self.forecast_speed(site, engine, largest.micro_batch)
                        held = self.cache.judge(
                            move_engine(spec, site), engine.simulate(largest.micro_batch), advise=False
                        )
                        forecast = replace(forecast, speed=speed, expandable=held.expandable)
                    self._report(site, _with_largest(forecast, largest))
        except SimulationFailed as failed:
            if failed.kind in _LASTING and not self._may_be_of_stage_3(spec, failed):
                raise
            self.failures[spec.rung] = failed
            place = f"{failed.place}: " if failed.place else ""
            for site in sites:
                reason = f"could not be simulated: {place}{first_line(str(failed.problem))} (autods fit tries it)"
                self._report(site, _not_applicable(spec.rung, site, reason))
        return others

    def _may_be_of_stage_3(self, spec: EngineSpec, failed: SimulationFailed) -> bool:
        """Whether code may fail because its parameters are split; if it fails without that, a lower stage tells."""
        stages = {rung.name: rung.stage for rung in self.settings.ladder}
        return failed.kind == "user_code" and stages[spec.rung] == 3 and min(stages.values()) < 3

    def find_engine(self, site: Site, rung: str) -> EngineSpec | None:
        """Return the engine of a rung of the plan at a site, shared with its group; None where it does not apply."""
        group = next(group for group in group_sites(self.settings.sites) if site in group)
        row = next(row for row in self.settings.ladder if row.name == rung)
        spec = make_group_engine(row, site, self.settings, self.facts, group)
        if not isinstance(spec, EngineSpec):
            return None
        known = self.forecasts.get((site.machine.name, rung))
        spec = offload_inputs(spec) if known is not None and known.offloads_inputs else spec
        simulation = self.cache.get(spec, site.micro_batch)
        shares = simulation is None or holds_on(simulation, spec, site.machine)
        return spec if shares else move_engine(spec, site)

    def forecast_at(self, site: Site, engine: CachedEngine, micro_batch: int) -> RungForecast:
        """Return the forecast of the engine on the site's machine, with its speed."""
        forecast = engine.forecast(micro_batch, on=move_engine(engine.spec, site))
        return replace(forecast, speed=self.forecast_speed(site, engine, micro_batch))

    def forecast_speed(self, site: Site, engine: CachedEngine, micro_batch: int) -> Speed | None:
        """Return the speed of the engine on the site's machine; None where it is not known."""
        return forecast_speed(
            move_engine(engine.spec, site),
            engine.simulate(micro_batch),
            accumulation=choose_accumulation(site, micro_batch, self.settings.source.form),
            tokens_per_sample=self.facts.tokens_per_sample,
            replicas=count_replicas(site.base, site.world_size),
        )

    def find_largest(self, site: Site, engine: CachedEngine, first: RungForecast) -> LargestMicroBatch:
        """Search the engine's largest micro batch at the site, from its first forecast there."""
        return engine.find_largest(self.list_sizes(site), on=move_engine(engine.spec, site), known=first)

    def list_sizes(self, site: Site) -> Sequence[int]:
        """Return the micro batches that the site's global batch allows, ascending."""
        return micro_batches(site.global_batch, count_replicas(site.base, site.world_size), MOST_MICRO_BATCH)

    def _report(self, site: Site, forecast: RungForecast) -> None:
        with self._lock:
            if self.stopped:
                return
            self.forecasts[site.machine.name, forecast.rung] = forecast
            total = len(self.settings.ladder) * len(self.settings.sites)
            done = len(self.forecasts)
            self.listen(RungFinished(machine=site.machine.name, forecast=forecast, done=done, total=total))

    def _before_simulation(self, spec: EngineSpec, micro_batch: int) -> None:
        if self.stopped:
            raise _Stopped
        self.listen(SimulationStarted(rung=spec.rung, micro_batch=micro_batch))


def _with_largest(forecast: RungForecast, largest: LargestMicroBatch) -> RungForecast:
    notes: list[str] = []
    if forecast.expandable:
        notes.append(f"{forecast.rung}: micro batch {largest.micro_batch} takes {EXPANDABLE}, which a fit sets")
    if not largest.proven:
        refused = f"; {largest.refused} does not fit, between them nothing was tried" if largest.refused else ""
        notes.append(f"{forecast.rung}: micro batch {largest.micro_batch} fits{refused}")
    if largest.micro_batch == MOST_MICRO_BATCH:
        notes.append(f"no micro batch above {MOST_MICRO_BATCH} was tried: more may fit")
    if largest.failures:
        size = min(largest.failures)
        notes.append(f"{forecast.rung}: micro batch {size} was not simulated: {largest.failures[size]}")
    return replace(forecast, largest_micro_batch=largest.micro_batch, assumed=(*forecast.assumed, *notes))
