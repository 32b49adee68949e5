"""Engines to forecast, and the cache of their simulations: each micro batch of an engine is simulated once."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType

from ..config.catalogue import Site
from ..config.checkpointing import INPUTS_ON_HOST
from ..config.deepspeed import BATCH_KEYS, ENOUGH_ACCUMULATION, compose, get_key, merge, nest_key, without_monitors
from ..config.rungs import Rung
from ..devices import find_device
from ..system.host import count_cores, find_memory_groups, read_host_memory
from ..types import Knobs, ModelFacts, Tier, WorkloadForm
from .interpolation import FAR, Line, draw_line
from .largest_batch import Fills, LargestMicroBatch, find_largest
from .predict.calibration import Observation, calibrate_forecast
from .predict.verdict import find_tier_short_at_build, judge_memory
from .simulate.protocol import SimulationFailed
from .values import (
    BUILT_BY_SCRIPT,
    Engine,
    EngineSpec,
    PartitionedBuild,
    RungForecast,
    Simulation,
    Simulator,
    Verdict,
)

PARALLEL_ENGINES = 2  # at least, and while trials run
_ENGINE_BYTES = 2**30  # an engine of 8 billion parameters and its process hold half of it
_ENOUGH_ON_THE_HOST = 3  # micro batches of a step
_MOST_DOUBTS = 2  # answers that were not as foreseen, until nothing is foreseen any more
_SETTING = re.compile(r"(\w+)\s*:\s*(\[[^\]]*\]|[^,\]]*)")
_HARMLESS = ("expandable_segments", "pinned_use_cuda_host_register", "pinned_num_register_threads")


def count_parallel_engines() -> int:
    """Return how many engines this host simulates at a time while it does nothing else: by cores and free memory."""
    free_bytes = read_host_memory(find_memory_groups()).free_bytes
    return max(PARALLEL_ENGINES, min(count_cores(), free_bytes // _ENGINE_BYTES))


def why_not_forecast(facts: ModelFacts) -> str | None:
    """Return the reason that this model's memory cannot be forecast; None when it can."""
    if facts.pipeline_stages:
        return "a pipeline is not forecast: its ranks hold different layers, and one rank alone is simulated"
    return None


def make_engine(site: Site, rung: Rung, knobs: Knobs, facts: ModelFacts, *, zero_init: bool = False) -> EngineSpec:
    """Return the engine of a config at a site, with as many micro batches a step as a simulation needs.

    With `zero_init`, stage 3 builds the model under `deepspeed.zero.Init`.
    """
    knobs = replace(knobs, accumulation=enough_accumulation(rung, knobs.accumulation))
    return EngineSpec(
        rung=rung.name,
        ds_config=without_monitors(compose(rung, knobs, site, facts)),
        world_size=site.world_size,
        device=site.device,
        checkpointing=knobs.checkpointing,
        zero_init=zero_init and rung.stage == 3,
        expandable=knobs.expandable,
        ranks_per_node=site.ranks_per_node,
        device_bytes=site.machine.device_bytes,
        machine=site.machine,
    )


def offload_inputs(spec: EngineSpec) -> EngineSpec:
    """Return the same engine with the inputs of recomputed layers on the host."""
    return replace(spec, ds_config=merge(spec.ds_config, nest_key(INPUTS_ON_HOST, True)))


def move_engine(spec: EngineSpec, site: Site) -> EngineSpec:
    """Return the same engine on the site's machine."""
    machine = site.machine
    return replace(spec, ranks_per_node=site.ranks_per_node, device_bytes=machine.device_bytes, machine=machine)


def enough_accumulation(rung: Rung, accumulation: int) -> int:
    """Return how many micro batches of a step to simulate. Longer accumulation repeats one of these.

    The second is the first that runs with kept gradients. Where these lie on the host, it also reads them back, and
    a third one tells that apart from the optimizer's step.
    """
    return min(accumulation, ENOUGH_ACCUMULATION if rung.places["gradients"] == "device" else _ENOUGH_ON_THE_HOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocConf:
    """The allocator's settings in the environment.

    `variable` is the one that torch reads. `expandable` is whether segments grow; None where it leaves that open.
    `unmodelled` are settings that change how much is reserved and that the forecast does not model.
    """

    variable: str | None = None
    expandable: bool | None = None
    unmodelled: tuple[str, ...] = ()

    @property
    def warning(self) -> str | None:
        """A sentence about the settings that are not modelled, if there are any."""
        if not self.unmodelled:
            return None
        return f"the forecast does not model these settings of {self.variable}: {', '.join(self.unmodelled)}"


def read_alloc_conf(environment: Mapping[str, str], device: str) -> AllocConf:
    """The settings as torch reads them for this device: the new variable replaces the old one as a whole."""
    kind = find_device(device)
    variable = kind.find_allocator_variable(environment)
    if variable is None:
        return AllocConf(expandable=None if kind.has_caching_allocator else False)
    settings = {key: value.strip() for key, value in _SETTING.findall(environment[variable])}
    native = settings.get("backend") == "native"
    unmodelled = [key for key in settings if key not in _HARMLESS and not (key == "backend" and native)]
    given = settings.get("expandable_segments")
    expandable = given.lower() == "true" if given else False if "backend" in unmodelled else None
    return AllocConf(variable=variable, expandable=expandable, unmodelled=tuple(unmodelled))


def list_limits(spec: EngineSpec) -> dict[Tier, int]:
    """Return the bytes of the tiers whose limit the engine's machine shows: the device's a rank, the others a node.

    A device that shares host memory has a budget for its own part only.
    """
    machine = spec.machine
    if machine is None:
        return {}
    host_bytes = None if find_device(spec.device).shares_host_memory else machine.host_bytes
    limits: dict[Tier, int | None] = {"device": machine.device_bytes, "host": host_bytes, "nvme": machine.nvme_bytes}
    return {tier: limit for tier, limit in limits.items() if limit is not None}


@dataclass(slots=True)
class SimulationCache:
    """Forecasts engines on one simulator, and keeps what was simulated. Several threads may use it.

    `expandable` is whether torch's allocator grows its segments, whatever a config says; None: each config decides.
    `before_simulation` is called with the engine and the micro batch before each simulation; it may raise.
    """

    simulator: Simulator
    expandable: bool | None = False
    before_simulation: Callable[[EngineSpec, int], None] | None = None
    _simulations: dict[tuple[str, int], Simulation] = field(default_factory=dict)
    _told: dict[tuple[str, int], Simulation] = field(default_factory=dict)  # by two of these

    @contextlib.contextmanager
    def open(self, spec: EngineSpec) -> Iterator[CachedEngine]:
        """Yield forecasts of one engine, which starts when something has to be simulated and ends with the block."""
        with contextlib.ExitStack() as stack:
            yield CachedEngine(self, spec, stack)

    def simulate(self, spec: EngineSpec, micro_batch: int) -> Simulation:
        """Simulate one micro batch on a separate engine, unless its result is known. Raises SimulationFailed."""
        with self.open(spec) as engine:
            return engine.simulate(micro_batch)

    def get(self, spec: EngineSpec, micro_batch: int) -> Simulation | None:
        """Return the simulation of a micro batch; None where none was made and none is told by others."""
        key = memory_key(spec), micro_batch
        return self._simulations.get(key) or self._told.get(key)

    def keep(self, spec: EngineSpec, micro_batch: int, simulation: Simulation) -> None:
        """Keep the simulation of a micro batch for all engines that allocate the same."""
        self._simulations[memory_key(spec), micro_batch] = simulation

    def keep_told(self, spec: EngineSpec, micro_batch: int, simulation: Simulation) -> None:
        """Keep what two simulations tell of a micro batch between them. It is no end of a further line."""
        self._told[memory_key(spec), micro_batch] = simulation

    def list_simulated(self, spec: EngineSpec) -> list[int]:
        """Return the micro batches of the engine that were simulated so far, ascending."""
        key = memory_key(spec)
        return sorted(micro_batch for known, micro_batch in tuple(self._simulations) if known == key)

    def judge(
        self,
        spec: EngineSpec,
        simulation: Simulation,
        observations: Collection[Observation] = (),
        *,
        advise: bool = True,
        chooses: bool = True,
        roughly: bool = False,
    ) -> RungForecast:
        """Return the forecast within the limits of the engine's machine, corrected by the measurements of trials.

        It `chooses` the allocator's segments where nobody has decided about them.
        """
        expandable = spec.expandable or self.expandable
        return judge_memory(
            spec,
            simulation,
            limits=list_limits(spec),
            calibration=calibrate_forecast(spec, observations),
            expandable=expandable if chooses else bool(expandable),
            advise=advise,
            roughly=roughly,
        )


@dataclass(slots=True)
class CachedEngine:
    """Forecasts one engine at any micro batch. All of its methods raise SimulationFailed."""

    cache: SimulationCache
    spec: EngineSpec
    _stack: contextlib.ExitStack
    _engine: Engine | None = None
    _lines: dict[tuple[int, int], Line | None] = field(default_factory=dict)  # by the micro batches of its ends

    def simulate(self, micro_batch: int) -> Simulation:
        """Return the simulation, which two others may tell already: nothing is simulated where they do."""
        known = self.cache.get(self.spec, micro_batch)
        if known is not None:
            return known
        line = self._find_line(micro_batch)
        if line is not None and line.proves(micro_batch):
            simulation = line.reach(micro_batch)
            self.cache.keep_told(self.spec, micro_batch, simulation)
            return simulation
        if self._engine is None:
            self._engine = self._stack.enter_context(self.cache.simulator.engine(self.spec))
        if self.cache.before_simulation is not None:
            self.cache.before_simulation(self.spec, micro_batch)
        simulation = self._engine.measure(micro_batch)
        self.cache.keep(self.spec, micro_batch, simulation)
        return simulation

    def foresee(self, micro_batch: int) -> Simulation | None:
        """Return the simulation that the smallest so far and one far above tell; None where they do not tell."""
        known, simulated = self.cache.get(self.spec, micro_batch), self.cache.list_simulated(self.spec)
        if known is not None or not simulated:
            return known
        far = FAR * simulated[0]
        with contextlib.suppress(SimulationFailed):
            self.simulate(far)
        line = self._draw_line(simulated[0], far)
        if line is None or not line.proves(micro_batch):
            return None
        self.cache.keep_told(self.spec, micro_batch, line.reach(micro_batch))
        return self.cache.get(self.spec, micro_batch)

    def forecast(self, micro_batch: int, *, on: EngineSpec | None = None) -> RungForecast:
        """Return the forecast on the engine's machine. `on` is the same engine on another one, to judge it there."""
        return self.cache.judge(on or self.spec, self.simulate(micro_batch))

    def find_largest(
        self,
        sizes: Sequence[int],
        *,
        on: EngineSpec | None = None,
        observations: Collection[Observation] = (),
        known: RungForecast | None = None,
    ) -> LargestMicroBatch:
        """Search `sizes` (ascending) for the largest micro batch that fits on the engine's machine, or `on` another.

        `known` is its forecast at a micro batch. Where a larger one cannot be simulated (the data of a script may end),
        it counts as too large and stands in `failures`.

        Two simulations foresee the others, see `interpolation`. An answer between them needs no other. One beyond them
        is simulated all the same, and what was foreseen counts only if it allocates byte for byte as foreseen.
        """
        spec, first = on or self.spec, None if known is None else (known.micro_batch, known.fills)
        failures: dict[int, str] = {}
        fills: dict[int, Fills] = {}
        foreseen: dict[int, Simulation] = {}
        doubts = 0

        def try_simulation(size: int) -> Simulation | None:
            try:
                return self.simulate(size)
            except SimulationFailed as failed:
                if not fills and known is None:
                    raise
                failures[size], fills[size] = " ".join(str(failed.problem).split()), {"failed": math.inf}
                return None

        def fill(size: int) -> Fills:
            if size not in fills:
                foresees = doubts < _MOST_DOUBTS and not failures
                if foresees:
                    self._simulate_far_end(size)
                line = self._find_line(size) if foresees else None
                simulation = try_simulation(size) if line is None else line.reach(size)
                if simulation is None:
                    return fills[size]
                if line is not None:
                    foreseen[size] = simulation
                fills[size] = self.cache.judge(spec, simulation, observations, advise=False, roughly=True).fills
            return fills[size]

        while True:
            largest = replace(find_largest(fill, sizes, known=first), failures=failures)
            answer = largest.refused if largest.micro_batch is None else largest.micro_batch
            if answer is None or answer not in foreseen:
                return largest
            simulation = try_simulation(answer)
            if simulation is not None and foreseen[answer].holds_as(simulation):
                return largest
            doubts += 1
            for size in foreseen.keys() - failures.keys():
                del fills[size]
            foreseen.clear()

    def _simulate_far_end(self, size: int) -> None:
        """Simulate the other end of a line from the only size that was simulated so far, if that is a smaller one.

        The line proves what lies between its ends, so it should reach beyond what fits. A simulation takes as long at
        any size. Where none can be made there, the search goes on without.
        """
        simulated = self.cache.list_simulated(self.spec)
        if len(simulated) == 1 and simulated[0] < size:
            with contextlib.suppress(SimulationFailed):
                self.simulate(FAR * simulated[0])

    def _find_line(self, size: int) -> Line | None:
        """Return the line through the simulations around this size, or else the two nearest; None if it is known."""
        simulated = self.cache.list_simulated(self.spec)
        if size in simulated or len(simulated) < 2:
            return None
        above = next((place for place, other in enumerate(simulated) if other > size), len(simulated) - 1)
        smaller, larger = simulated[max(above, 1) - 1 : max(above, 1) + 1]
        return self._draw_line(smaller, larger)

    def _draw_line(self, smaller: int, larger: int) -> Line | None:
        """Return the line through two micro batches; None where one of them is not known, or they do not tell."""
        if (smaller, larger) not in self._lines:
            ends = self.cache.get(self.spec, smaller), self.cache.get(self.spec, larger)
            self._lines[smaller, larger] = draw_line(ends[0], ends[1]) if ends[0] and ends[1] else None
        return self._lines[smaller, larger]


def find_partitioned_build(
    cache: SimulationCache,
    rungs: Iterable[tuple[EngineSpec, RungForecast]],
    facts: ModelFacts,
    form: WorkloadForm,
    observations: Collection[Observation] = (),
    ran_out: Mapping[str, Tier] = MappingProxyType({}),
) -> PartitionedBuild | None:
    """Return what building under `deepspeed.zero.Init` gives the rungs that lack memory to build; None for nothing.

    These are rungs by their forecast, and those of `ran_out`: their trials lacked that tier while they built. One that
    would fit goes before one that may, and both before one that the workload's code prevents. Each stage-3 rung that
    builds the whole model is simulated once more.
    """
    builds = [
        build
        for spec, whole in rungs
        if get_key(spec.ds_config, "zero_optimization.stage") == 3
        and not spec.zero_init
        and (tier := find_tier_short_at_build(whole, spec.device) or ran_out.get(spec.rung)) is not None
        and (build := _split_build(cache, spec, whole, tier, facts, form, observations)) is not None
    ]
    order: tuple[Verdict, ...] = ("fits", "tight", "not_applicable")
    return min(builds, key=lambda build: order.index(build.verdict), default=None)


def _split_build(
    cache: SimulationCache,
    spec: EngineSpec,
    whole: RungForecast,
    tier: Tier,
    facts: ModelFacts,
    form: WorkloadForm,
    observations: Collection[Observation],
) -> PartitionedBuild | None:
    if tier not in whole.memory:
        return None
    limit_bytes = whole.memory[tier].limit_bytes
    if limit_bytes is None and "device" in whole.memory:  # the host is the device, and their budgets all that there is
        limit_bytes = spec.ranks_of_node * (whole.memory["device"].limit_bytes or 0)
    build = PartitionedBuild(
        rung=spec.rung,
        verdict="not_applicable",
        tier=tier,
        ranks=spec.ranks_of_node,
        whole_bytes=whole.memory[tier].peak_bytes,
        limit_bytes=limit_bytes or None,
    )
    if form.runs_as_main:
        simulation = cache.get(spec, whole.micro_batch)
        is_whole = simulation is not None and simulation.builds_whole(facts.parameters)
        return replace(build, obstacle=BUILT_BY_SCRIPT) if is_whole else None
    split_spec = replace(spec, zero_init=True)
    try:
        split = cache.judge(split_spec, cache.simulate(split_spec, whole.micro_batch), observations)
    except SimulationFailed as failed:
        return replace(build, obstacle=": ".join(filter(None, (failed.problem, failed.hint))))
    split_bytes = split.memory[tier].peak_bytes if tier in split.memory else 0
    if split.verdict == "cannot_fit" or split_bytes >= build.whole_bytes:
        return None
    return replace(build, verdict=split.verdict, split_bytes=split_bytes)


def memory_key(spec: EngineSpec) -> str:
    """Return equal keys for engines that allocate the same at a micro batch.

    What `enough_accumulation` tells apart is kept apart.
    """
    config = {key: value for key, value in spec.ds_config.items() if key not in BATCH_KEYS}
    accumulation = min(_ENOUGH_ON_THE_HOST, int(spec.ds_config.get("gradient_accumulation_steps") or 1))
    known = {**asdict(replace(spec, machine=None, expandable=False)), "ds_config": config, "accumulation": accumulation}
    return json.dumps({**known, "family": spec.family}, sort_keys=True, default=str)
