"""Forecast rungs for plans, fits and probes: one engine a config, each micro batch simulated once."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace

from ..config.catalogue import Machine
from ..config.deepspeed import BATCH_KEYS
from ..config.rungs import Rung
from ..devices import find_device
from ..diagnosis.trial_outcome import wants_larger_batch
from ..errors import AutodsError
from ..system.host import count_cores, find_memory_groups, read_host_memory
from ..types import Fit, ModelFacts, Outcome, Tier, Trial
from .predict.allocator import Replay
from .predict.calibration import (
    Observation,
    StepFactors,
    StepObservation,
    StepParts,
    calibrate_forecast,
    fit_step_factors,
    observe_trial,
)
from .predict.prices import Unpriced
from .predict.step_time import forecast_speed, least_step_s
from .predict.verdict import judge_memory, replay_at_limit
from .simulate.client import SimulationFailed
from .values import Engine, EngineSpec, RungForecast, Simulation, Simulator

MOST_MICRO_BATCH = 4096
MOST_MEASUREMENTS = 8
_NOTICEABLE = 0.1  # of a bracket: where the chord moves less, its steep end misleads it
_NEAR = 1.03  # a bracket of 100 and 103 is not worth another simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestMicroBatch:
    """The result of a search for the largest micro batch that fits.

    `micro_batch` is the largest measured size that fits, or None when none does.
    `refused` is the smallest measured size that does not fit, or None when all fit.
    `proven` is whether the search is done: few or no sizes are left between the two.
    `slope` is the growth of the fill with each sample, at the answer; None when it was not measured.
    `failures` maps each size that could not be simulated to the reason.
    """

    micro_batch: int | None
    refused: int | None
    proven: bool
    measured: tuple[int, ...]
    slope: float | None = None
    failures: Mapping[int, str] = field(default_factory=dict)


def find_largest(
    fill: Callable[[int], float],
    sizes: Sequence[int],
    *,
    known: tuple[int, float] | None = None,
    slope: float | None = None,
    most: int = MOST_MEASUREMENTS,
) -> LargestMicroBatch:
    """Search `sizes` (ascending) with at most `most` measurements; `known` is a size that was measured before.

    `fill` returns the peak over the limit of the fullest tier: up to 1 a micro batch fits.
    `slope` is the one at another rung's answer. Rungs have the same activations, so it is a good first guess.
    """
    seen: dict[int, float] = dict([known]) if known else {}
    while len(seen) - bool(known) < most and (size := _next(seen, sizes, slope)) is not None:
        seen[size] = fill(size)
    fits, refused = _bracket(seen)
    steep = (seen[refused] - seen[fits]) / (refused - fits) if fits and refused else None
    proven = _next(seen, sizes) is None
    return LargestMicroBatch(micro_batch=fits, refused=refused, proven=proven, measured=tuple(seen), slope=steep)


def _bracket(seen: dict[int, float]) -> tuple[int | None, int | None]:
    """Return the largest size that fits below the smallest one that does not, and that one."""
    refused = min((size for size, full in seen.items() if full > 1), default=None)
    fitting = (size for size, full in seen.items() if full <= 1 and (refused is None or size < refused))
    return max(fitting, default=None), refused


def _next(seen: dict[int, float], sizes: Sequence[int], slope: float | None = None) -> int | None:
    """Return the size to measure next; None when the search is over."""
    fits, refused = _bracket(seen)
    left = [size for size in sizes if (fits is None or size > fits) and (refused is None or size < refused)]
    if not left or (fits is not None and refused is not None and refused <= _NEAR * fits):
        return None
    if fits is None:
        return left[0]
    target = _extrapolated(seen, fits, slope) if refused is None else _interpolated(seen, fits, refused)
    return max((size for size in left if size <= target), default=left[0])


def _extrapolated(seen: dict[int, float], fits: int, guess: float | None) -> float:
    """Return where the line through the two largest sizes reaches the limit; 8 times the size without a line."""
    before = max((size for size in seen if size < fits), default=None)
    slope = (guess or 0.0) if before is None else (seen[fits] - seen[before]) / (fits - before)
    if slope <= 0:
        return 8.0 * fits
    target = fits + (1 - seen[fits]) / slope
    return target if before is None else min(target, 16.0 * fits)


def _interpolated(seen: dict[int, float], fits: int, refused: int) -> float:
    """Return where the peak should reach the limit, between a batch that fits and one that does not.

    The peak grows ever faster. The line from the size that fits to the one that does not reaches the limit too early.
    The line through two sizes that do not fit reaches it too late, unless the peak is linear there.
    Where neither helps, the answer is the geometric middle.
    """
    beyond = min((size for size in seen if size > refused), default=None)
    if beyond is not None and math.isfinite(slope := (seen[beyond] - seen[refused]) / (beyond - refused)) and slope > 0:
        return max(fits + 1, min(refused - (seen[refused] - 1) / slope, refused - 1))
    chord = fits + (1 - seen[fits]) / (seen[refused] - seen[fits]) * (refused - fits)
    return chord if chord - fits > _NOTICEABLE * (refused - fits) else math.sqrt(fits * refused)


PARALLEL_ENGINES = 2  # at least, and while trials run
_ENGINE_BYTES = 2**30  # an engine of 8 billion parameters and its process hold half of it
_ENOUGH_ACCUMULATION, _ENOUGH_ON_THE_HOST = 2, 3  # micro batches of a step
_LARGEST_FIRST_MICRO_BATCH = 8  # as the walk of the ladder, which tries no larger one first


def count_parallel_engines() -> int:
    """Return how many engines this host simulates at a time while it does nothing else: by cores and free memory."""
    free_bytes = read_host_memory(find_memory_groups()).free_bytes
    return max(PARALLEL_ENGINES, min(count_cores(), free_bytes // _ENGINE_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The memory that a rung may use: the device's bytes a rank, the others a node; None where it is not known."""

    device_bytes: int
    host_bytes: int | None = None
    nvme_bytes: int | None = None

    def by_tier(self, device: str) -> dict[Tier, int]:
        """Return the limits that are known. A device that shares host memory has a budget for its own part only."""
        host_bytes = None if find_device(device).shares_host_memory else self.host_bytes
        limits: dict[Tier, int | None] = {"device": self.device_bytes, "host": host_bytes, "nvme": self.nvme_bytes}
        return {tier: limit for tier, limit in limits.items() if limit is not None}


@dataclass(slots=True)
class Forecaster:
    """Forecasts engines on one simulator; each micro batch of an engine is simulated once. Thread-safe.

    `expandable` tells that torch's allocator has expandable segments.
    `before_simulation` is called with the engine and the micro batch before each simulation; it may raise.
    """

    simulator: Simulator
    expandable: bool = False
    before_simulation: Callable[[EngineSpec, int], None] | None = None
    _simulations: dict[tuple[str, int], Simulation] = field(default_factory=dict)

    @contextlib.contextmanager
    def open(self, spec: EngineSpec) -> Iterator[EngineForecaster]:
        """Yield forecasts of one engine, which starts when something has to be simulated and ends with the block."""
        with contextlib.ExitStack() as stack:
            yield EngineForecaster(self, spec, stack)

    def simulate(self, spec: EngineSpec, micro_batch: int) -> Simulation:
        """Simulate one micro batch on a separate engine, unless its result is known. Raises SimulationFailed."""
        with self.open(spec) as engine:
            return engine.simulate(micro_batch)

    def get(self, spec: EngineSpec, micro_batch: int) -> Simulation | None:
        return self._simulations.get((memory_key(spec), micro_batch))

    def list_simulated(self, spec: EngineSpec) -> list[int]:
        """Return the micro batches of the engine that were simulated so far, ascending."""
        key = memory_key(spec)
        return sorted(micro_batch for known, micro_batch in self._simulations if known == key)

    def judge(
        self,
        spec: EngineSpec,
        simulation: Simulation,
        limits: Limits,
        observations: Collection[Observation] = (),
        *,
        advise: bool = True,
    ) -> RungForecast:
        """Return the forecast within these limits, corrected by the measurements of trials."""
        return judge_memory(
            spec,
            simulation,
            limits=limits.by_tier(spec.device),
            calibration=calibrate_forecast(spec, observations),
            expandable=self.expandable,
            advise=advise,
        )

    def replay_at_limit(self, simulation: Simulation, forecast: RungForecast) -> Replay | None:
        """Return how torch's allocator does at the device's limit, see `verdict.replay_at_limit`."""
        return replay_at_limit(simulation, forecast, expandable=self.expandable)


@dataclass(slots=True)
class EngineForecaster:
    """Forecasts one engine at any micro batch. All of its methods raise SimulationFailed."""

    forecaster: Forecaster
    spec: EngineSpec
    _stack: contextlib.ExitStack
    _engine: Engine | None = None

    def simulate(self, micro_batch: int) -> Simulation:
        known = self.forecaster.get(self.spec, micro_batch)
        if known is not None:
            return known
        if self._engine is None:
            self._engine = self._stack.enter_context(self.forecaster.simulator.engine(self.spec))
        if self.forecaster.before_simulation is not None:
            self.forecaster.before_simulation(self.spec, micro_batch)
        simulation = self._engine.measure(micro_batch)
        self.forecaster._simulations[memory_key(self.spec), micro_batch] = simulation
        return simulation

    def stop(self) -> None:
        """End the engine, so that another one may run. A micro batch that was not simulated yet starts it again."""
        self._stack.close()
        self._engine = None

    def forecast(self, micro_batch: int, limits: Limits, *, on: EngineSpec | None = None) -> RungForecast:
        """Return the forecast within these limits. `on` is the same engine on another machine, to judge it there."""
        return self.forecaster.judge(on or self.spec, self.simulate(micro_batch), limits)

    def find_largest(
        self,
        sizes: Sequence[int],
        limits: Limits,
        *,
        on: EngineSpec | None = None,
        observations: Collection[Observation] = (),
        known: tuple[int, float] | None = None,
        slope: float | None = None,
    ) -> LargestMicroBatch:
        """Search `sizes` (ascending) for the largest micro batch that fits within the limits.

        `known` is a micro batch and its fill, and `slope` a guess, as for the function of this name. Where a larger
        micro batch cannot be simulated (the data of a script may end), it counts as too large and stands in `failures`.
        """
        spec = on or self.spec
        failures: dict[int, str] = {}
        measured = [] if known is None else [known[0]]

        def fill(size: int) -> float:
            try:
                simulation = self.simulate(size)
            except SimulationFailed as failed:
                if not measured:
                    raise
                failures[size] = " ".join(str(failed.problem).split())
                return math.inf
            measured.append(size)
            return self.forecaster.judge(spec, simulation, limits, observations, advise=False).fill

        return replace(find_largest(fill, sizes, known=known, slope=slope), failures=failures)


def enough_accumulation(rung: Rung, accumulation: int) -> int:
    """Return how many micro batches of a step to simulate. Longer accumulation repeats one of these.

    The second is the first that runs with kept gradients. Where these lie on the host, it also reads them back, and
    a third one tells that apart from the optimizer's step.
    """
    return min(accumulation, _ENOUGH_ACCUMULATION if rung.places["gradients"] == "device" else _ENOUGH_ON_THE_HOST)


def why_not_forecast(facts: ModelFacts) -> str | None:
    """Return the reason that this model's memory cannot be forecast; None when it can."""
    if facts.pipeline_stages:
        return "a pipeline is not forecast: its ranks hold different layers, and one rank alone is simulated"
    return None


def memory_key(spec: EngineSpec) -> str:
    """Return equal keys for engines that allocate the same at a micro batch.

    What `enough_accumulation` tells apart is kept apart.
    """
    config = {key: value for key, value in spec.ds_config.items() if key not in BATCH_KEYS}
    accumulation = min(_ENOUGH_ON_THE_HOST, int(spec.ds_config.get("gradient_accumulation_steps") or 1))
    known = {**asdict(replace(spec, machine=None)), "ds_config": config, "accumulation": accumulation}
    del known["nvlink"], known["capability"], known["machine"]
    return json.dumps({**known, "takes_flash": spec.takes_flash}, sort_keys=True, default=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepForecast:
    """The seconds of a trial's optimizer step: what is expected, and the least that the machine's peak rates allow."""

    seconds: float
    least_seconds: float


@dataclass(slots=True)
class TrialForecaster:
    """Forecasts the trials of a fit, corrected by the trials' measurements; a `tuner.forecasts.Forecaster`.

    A simulation that fails is reported once, by `report`, and leaves its trials without a forecast.
    A model may refuse so few samples: the forecast is then that of a larger micro batch.

    `spec_of` returns the engine that a trial runs, with `enough_accumulation` micro batches a step.
    `key_of` returns the trial's key in `observations`.
    `machine` has the rates that step times are forecast by; None where they are unknown. `factors` are those that
    earlier fits on this machine have left.
    """

    forecaster: Forecaster
    spec_of: Callable[[Trial], EngineSpec]
    key_of: Callable[[Trial], str]
    limits: Limits
    report: Callable[[str], None]
    machine: Machine | None = None
    factors: StepFactors = field(default_factory=StepFactors)
    observations: dict[str, Observation] = field(default_factory=dict)
    forecasts: dict[str, RungForecast] = field(default_factory=dict)  # the first forecast of each rung, for the report
    _pending: dict[tuple[str, int], Future[Simulation]] = field(default_factory=dict)
    _reported: set[str] = field(default_factory=set)
    _least: int = 1  # the model cannot be trained with a smaller micro batch
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(PARALLEL_ENGINES))

    def prepare(self, trials: Iterable[Trial]) -> None:
        """Start to simulate these trials in the background, in this order."""
        for trial in trials:
            self._start(self._with_least(trial))

    def finish(self) -> None:
        """Drop simulations that have not begun and wait for the others: timed trials need an idle host."""
        with self._lock:
            self._pending = {key: future for key, future in self._pending.items() if not future.cancel()}
        for future in tuple(self._pending.values()):
            future.exception()

    def close(self) -> None:
        """Begin nothing more; simulations that run end with the simulator."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def forecast(self, trial: Trial) -> RungForecast | None:
        """Return the memory that the trial will need; None when it cannot be simulated."""
        trial = self._with_least(trial)
        spec, micro_batch = self.spec_of(trial), trial.knobs.micro_batch
        try:
            simulation = self.forecaster.get(spec, micro_batch) or self._start(trial).result()
        except AutodsError as error:
            return self.forecast(trial) if self._can_retry(trial.rung, micro_batch, error) else None
        forecast = self.forecaster.judge(spec, simulation, self.limits, self.observations.values())
        self.forecasts.setdefault(trial.rung, forecast)
        return forecast

    def largest(self, trial: Trial, sizes: Sequence[int], usable_bytes: float) -> int | None:
        """Return the largest micro batch that should fit in `usable_bytes` of the device; None when unknown."""
        sizes = [size for size in sizes if size >= self._least]
        limits = replace(self.limits, device_bytes=int(usable_bytes))
        try:
            with self.forecaster.open(self.spec_of(trial)) as engine:
                return engine.find_largest(sizes, limits, observations=tuple(self.observations.values())).micro_batch
        except AutodsError as error:
            smallest = min(sizes, default=_LARGEST_FIRST_MICRO_BATCH)
            return self.largest(trial, sizes, usable_bytes) if self._can_retry(trial.rung, smallest, error) else None

    def step_time(self, trial: Trial) -> StepForecast | None:
        """Return the seconds of the trial's step, corrected by the trials so far; None when it cannot be forecast.

        The step is that of `trial.knobs.accumulation` micro batches. It costs a simulation unless `largest` made it.
        """
        parts = self._step_parts(trial)
        if parts is None:
            return None
        step, least_s = parts
        seconds = self.step_factors().correct(step)
        return StepForecast(seconds=max(seconds, least_s), least_seconds=least_s)

    def step_factors(self) -> StepFactors:
        """Return the machine's factors after the trials so far."""
        return fit_step_factors(self.observations.values(), self.factors)

    def learn(self, trial: Trial, outcome: Outcome) -> Observation | None:
        """Store the trial's peak with its forecast, and return both; None if the trial shows nothing new."""
        spec, key = self.spec_of(trial), self.key_of(trial)
        simulation = self.forecaster.get(spec, trial.knobs.micro_batch)
        if simulation is None or key in self.observations:
            return None
        observation = observe_trial(spec, simulation, outcome, expandable=self.forecaster.expandable)
        if observation is not None:
            observation = replace(observation, step=self._observe_step(trial, outcome))
            self.observations[key] = observation
        return observation

    def _observe_step(self, trial: Trial, outcome: Outcome) -> StepObservation | None:
        if not (isinstance(outcome, Fit) and len(outcome.step_s) > 1 and trial.exam is None):
            return None  # a single step may be the one in which the allocator grows
        parts = self._step_parts(trial)
        if parts is None:
            return None
        return StepObservation(parts=parts[0], measured_s=statistics.median(outcome.step_s))

    def _step_parts(self, trial: Trial) -> tuple[StepParts, float] | None:
        """The step before calibration, and its seconds at peak rates."""
        if self.machine is None or self.forecast(trial) is None:
            return None
        trial = self._with_least(trial)
        spec, knobs = self.spec_of(trial), trial.knobs
        simulation = self.forecaster.get(spec, knobs.micro_batch)
        if simulation is None or simulation.schedule is None:
            return None
        ranks_per_node = min(spec.ranks_per_node, spec.world_size)
        speed = forecast_speed(
            simulation.schedule,
            self.machine,
            world_size=spec.world_size,
            ranks_per_node=ranks_per_node,
            micro_batch=knobs.micro_batch,
            accumulation=knobs.accumulation,
            tokens_per_sample=None,
        )
        try:
            least_s = least_step_s(
                simulation.schedule,
                self.machine,
                ranks_per_node=ranks_per_node,
                accumulation=knobs.accumulation,
            )
        except Unpriced:
            return None
        if speed is None:
            return None
        spent = speed.step.spent
        launched_s, moved_s = spent["launch"], spent["communication"] + spent["host"]
        computed_s = speed.step.seconds - launched_s - moved_s
        issued_s = speed.step.issued_seconds
        parts = StepParts(computed_s=computed_s, launched_s=launched_s, moved_s=moved_s, issued_s=issued_s)
        return parts, least_s

    def _start(self, trial: Trial) -> Future[Simulation]:
        spec, micro_batch = self.spec_of(trial), trial.knobs.micro_batch
        key = memory_key(spec), micro_batch
        with self._lock:
            if key not in self._pending:
                self._pending[key] = self._pool.submit(self.forecaster.simulate, spec, micro_batch)
            return self._pending[key]

    def _with_least(self, trial: Trial) -> Trial:
        return replace(trial, knobs=replace(trial.knobs, micro_batch=max(self._least, trial.knobs.micro_batch)))

    def _can_retry(self, rung: str, micro_batch: int, error: AutodsError) -> bool:
        """Double the least micro batch if this one has too few samples for the model; else report the error, once."""
        if micro_batch < _LARGEST_FIRST_MICRO_BATCH and wants_larger_batch(str(error)):
            self._least = max(self._least, 2 * micro_batch)
            return True
        reason = "; ".join(" ".join(line.split()) for line in str(error).splitlines())
        if reason not in self._reported:
            self._reported.add(reason)
            self.report(f"no forecast of {rung}, so it is tried: {reason}")
        return False
