"""What another setting would give: another micro batch or state of checkpointing of the best rung, or `--zero-init`.

Also what a rung by name would give that eases what the best rung waits for.

The search for the largest micro batch tells what a smaller one needs; the others take new simulations.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from ..config.catalogue import Site
from ..config.checkpointing import name_state, offloads_inputs
from ..config.deepspeed import BATCH_KEYS, choose_accumulation, says_accumulation
from ..config.rungs import read_rungs
from ..devices import find_device
from ..events import Note
from ..forecast.largest_batch import Fills
from ..forecast.partial_checkpointing import ShareEnd, rank_shares
from ..forecast.predict.step_time import CLOSE, Speed
from ..forecast.predict.verdict import replay_at_limit
from ..forecast.simulate.protocol import SimulationFailed
from ..forecast.simulation_cache import CachedEngine, find_partitioned_build, move_engine, offload_inputs
from ..forecast.values import EngineSpec, PartitionedBuild, RungForecast
from ..report.results.plan import Alternative
from .rung_forecasts import PlanRun, make_group_engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """What lies beside the best rung of a site; `SiteForecast` has the same fields, and tells what they are."""

    alternatives: tuple[Alternative, ...] = ()
    unaccumulated: RungForecast | None = None
    runs_full: bool = False


@dataclass(slots=True)
class NeighbourSearch:
    """The search for the neighbours of a site's best rung. It may begin before the last rungs are known.

    It is of one rung at a time, for a search may hold one engine while it waits for another.
    """

    run: PlanRun
    site: Site
    _best: RungForecast | None = None
    _found: Future[Neighbours] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "neighbours"))

    def begin(self, best: RungForecast) -> Future[Neighbours]:
        """Begin the search for a rung that is the best so far, if it has not begun. A search for another is over."""
        with self._lock:
            if self._found is None or best != self._best:
                if self._found is not None:
                    self._found.cancel()  # unless it is under way
                self._best, self._found = best, self._thread.submit(_find_neighbours, self.run, self.site, best)
            return self._found


def _find_neighbours(run: PlanRun, site: Site, best: RungForecast) -> Neighbours:
    """Answer the questions about a rung at the same time, as many as engines are free."""
    with ThreadPoolExecutor(thread_name_prefix="neighbours") as pool:
        unaccumulated = pool.submit(_forecast_unaccumulated, run, site, best)
        full = pool.submit(_runs_full, run, site, best)
        alternatives = _list_alternatives(run, site, best, pool)
        return Neighbours(alternatives=alternatives, unaccumulated=unaccumulated.result(), runs_full=full.result())


def _list_alternatives(
    run: PlanRun, site: Site, best: RungForecast, pool: ThreadPoolExecutor
) -> tuple[Alternative, ...]:
    """Return the neighbours of the best rung's forecast; none where its time is not known."""
    spec, speed = run.find_engine(site, best.rung), best.speed
    if spec is None or speed is None:
        return ()
    by_name = pool.submit(lambda: [*_list_rungs_by_name(run, site, spec, speed)])
    alternatives = [*_list_micro_batches(run, site, spec, speed.micro_batch)]
    if run.facts.checkpointing:
        switch = partial(_switch_checkpointing, run, site, spec)
        offloads = run.chooses_offload(spec) and not best.offloads_inputs and _waits(speed)
        offloaded = pool.submit(switch, offload_inputs(spec)) if offloads else None
        alternatives += switch(replace(spec, checkpointing=not spec.checkpointing))
        alternatives += _recompute_in_part(run, site, spec, [best, *(each.forecast for each in alternatives)])
        alternatives += [] if offloaded is None else offloaded.result()
    return (*alternatives, *by_name.result())


def _forecast_unaccumulated(run: PlanRun, site: Site, best: RungForecast) -> RungForecast | None:
    """Return the best rung's forecast with one micro batch a step; None where the user says how many there are.

    The breakdown of the best forecast would not tell: without accumulation the peak may lie elsewhere.
    """
    alone, form = replace(site, base={**site.base, BATCH_KEYS[2]: 1}), run.settings.source.form
    if says_accumulation(site) or choose_accumulation(site, best.micro_batch, form) == 1:
        return None
    row = next(row for row in run.settings.ladder if row.name == best.rung)
    spec = make_group_engine(row, alone, run.settings, run.facts, (alone,))
    if not isinstance(spec, EngineSpec):
        return None
    run.listen(Note(text=f"{best.rung} without accumulation", passing=True))
    try:
        with run.cache.open(spec) as engine:
            return run.forecast_at(alone, engine, best.micro_batch)
    except SimulationFailed:
        return None


def _runs_full(run: PlanRun, site: Site, best: RungForecast) -> bool:
    """Whether the best rung's allocator should give its cache back in each step; False where that is not known.

    Weights that another stream gathers ahead come back late, and the card fills up with them. What a rung needs is
    without these. At its limit the allocator waits for the card and flushes its cache, which takes time.
    """
    spec = run.find_engine(site, best.rung)
    if spec is None or not find_device(spec.device).has_caching_allocator:
        return False
    with suppress(SimulationFailed), run.cache.open(spec) as engine:
        simulation = engine.simulate(best.largest_micro_batch or best.micro_batch)
        forecast = run.cache.judge(move_engine(spec, site), simulation, advise=False, roughly=True)
        replayed = replay_at_limit(move_engine(spec, site), simulation, forecast)
        return replayed is not None and replayed.runs_full
    return False


def propose_partitioned_build(run: PlanRun, site: Site) -> PartitionedBuild | None:
    """Return what `--zero-init` gives the rungs of a site that lack memory to build; None where that helps none."""
    forecasts = [forecast for forecast in run.list_forecasts(site) if forecast.memory]
    engines = ((run.find_engine(site, forecast.rung), forecast) for forecast in forecasts)
    rungs = [(spec, forecast) for spec, forecast in engines if spec is not None]
    return find_partitioned_build(run.cache, rungs, run.facts, run.settings.source.form)


def _list_micro_batches(run: PlanRun, site: Site, spec: EngineSpec, micro_batch: int) -> list[Alternative]:
    """After a search for the largest micro batch, the one nearest to half of this one, and the next larger one."""
    if not run.settings.largest:
        return []
    smaller = (size for size in run.list_sizes(site) if size < micro_batch)
    half = min(smaller, key=lambda size: abs(2 * size - micro_batch), default=0)
    larger = next((size for size in run.list_sizes(site) if size > micro_batch), 0)
    with run.cache.open(spec) as engine:
        judged = (_try_to_judge(run, site, engine, size, switched=False) for size in (half, larger) if size)
        return [each for each in judged if each is not None]


def _list_rungs_by_name(run: PlanRun, site: Site, best: EngineSpec, speed: Speed) -> Iterator[Alternative]:
    """Rungs outside the plan's ladder that ease what bounds the best rung and are faster, at its micro batch.

    Their states lie where those of the best rung do. The first of a family that may fit stands for it.
    """
    known, listed = {rung.name: rung for rung in run.settings.ladder}, set[str]()
    for rung in read_rungs().values():
        if rung.name in known or rung.family in listed or rung.eases != speed.step.bound:
            continue
        if rung.places != known[best.rung].places:
            continue
        spec = make_group_engine(rung, site, run.settings, run.facts, (site,))
        if not isinstance(spec, EngineSpec):
            continue
        run.listen(Note(text=f"{rung.name}, which {best.rung} may gain by", passing=True))
        spec = offload_inputs(spec) if offloads_inputs(best.ds_config) else spec
        with suppress(SimulationFailed), run.cache.open(spec) as engine:
            other = _judge(run, site, engine, speed.micro_batch, switched=False)
            if rung.family:
                if other.forecast.verdict == "cannot_fit":
                    continue
                listed.add(rung.family)
            if other.forecast.speed and other.forecast.speed.samples_per_second > speed.samples_per_second:
                yield replace(other, opt_in=rung.opt_in)


def _waits(speed: Speed) -> bool:
    """Whether the card waits for links and the host, so that a larger micro batch may gain what offloading costs."""
    computed_s = speed.step.spent["compute"] + speed.step.spent["memory"]
    return computed_s < (1 - CLOSE) * speed.step.seconds


def _switch_checkpointing(run: PlanRun, site: Site, spec: EngineSpec, other: EngineSpec) -> list[Alternative]:
    """The best rung's engine `spec` with another state of checkpointing, at its largest micro batch."""
    state = name_state(other.checkpointing, on_host=offloads_inputs(other.ds_config))
    run.listen(Note(text=f"{spec.rung} with checkpointing {state}", passing=True))
    try:
        with run.cache.open(other) as engine:
            first = _judge(run, site, engine, site.micro_batch, switched=True)
            known = run.cache.get(spec, site.micro_batch)
            if known is not None and known.live_bytes == engine.simulate(site.micro_batch).live_bytes:
                return []  # the model's own code decides
            if not run.settings.largest or first.forecast.verdict == "cannot_fit":
                return [first]
            largest = run.find_largest(site, engine, first.forecast)
            size = largest.micro_batch
            return [first if size is None else _judge(run, site, engine, size, switched=True)]
    except SimulationFailed:
        return []


def _recompute_in_part(run: PlanRun, site: Site, spec: EngineSpec, others: Sequence[RungForecast]) -> list[Alternative]:
    """The best rung's engine `spec` with a share of its layers recomputed, where that is faster than the others."""
    if run.settings.checkpointing is not None or not run.settings.largest or offloads_inputs(spec.ds_config):
        return []
    rates = [other.speed.samples_per_second for other in others if other.verdict != "cannot_fit" and other.speed]
    with suppress(SimulationFailed):
        with run.cache.open(spec) as whole, run.cache.open(replace(spec, checkpointing=False)) as none:
            if run.cache.get(none.spec, site.micro_batch) is None:
                return []
            most, least = (_make_share_end(run, site, engine) for engine in (whole, none))
            share = next(iter(rank_shares(most, least, run.facts.alike_layers, run.list_sizes(site))), None)
        if share is None or share.samples_per_second <= (1 + CLOSE) * max(rates):
            return []
        run.listen(Note(text=f"{spec.rung} with one in {share.every} layers recomputed", passing=True))
        with run.cache.open(replace(spec, checkpointing=share.every)) as engine:
            return [_judge(run, site, engine, share.micro_batch, switched=True)]
    return []


def _make_share_end(run: PlanRun, site: Site, engine: CachedEngine) -> ShareEnd:
    def find_fills(micro_batch: int) -> Fills | None:
        simulation, spec = engine.foresee(micro_batch), move_engine(engine.spec, site)
        return None if simulation is None else run.cache.judge(spec, simulation, advise=False, roughly=True).fills

    def find_rate(micro_batch: int) -> float | None:
        speed = run.forecast_speed(site, engine, micro_batch)
        return None if speed is None else speed.samples_per_second

    return ShareEnd(find_fills=find_fills, find_rate=find_rate)


def _try_to_judge(
    run: PlanRun, site: Site, engine: CachedEngine, micro_batch: int, *, switched: bool
) -> Alternative | None:
    try:
        return _judge(run, site, engine, micro_batch, switched=switched)
    except SimulationFailed:
        return None


def _judge(run: PlanRun, site: Site, engine: CachedEngine, micro_batch: int, *, switched: bool) -> Alternative:
    forecast = run.forecast_at(site, engine, micro_batch)
    return Alternative(forecast=forecast, checkpointing=engine.spec.checkpointing, switched=switched)
