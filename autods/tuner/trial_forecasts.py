"""Simulated forecasts of a fit's trials, corrected by what its trials measure."""

from __future__ import annotations

import contextlib
import os
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from ..config.settings import Settings
from ..devices import find_device
from ..diagnosis.trial_outcome import wants_larger_batch
from ..errors import AutodsError, keep_alternatives
from ..events import Listener, Note
from ..forecast.largest_batch import Fills, find_last
from ..forecast.predict.calibration import (
    Observation,
    StepFactors,
    StepObservation,
    StepParts,
    fit_step_factors,
    observe_trial,
)
from ..forecast.predict.replay import Replay
from ..forecast.predict.step_time import least_step_s
from ..forecast.predict.verdict import forecast_speed, replay_at_limit
from ..forecast.simulate.client import ProcessSimulator
from ..forecast.simulate.protocol import SimulationFailed
from ..forecast.simulation_cache import (
    SimulationCache,
    count_parallel_engines,
    find_partitioned_build,
    make_engine,
    memory_key,
    read_alloc_conf,
    why_not_forecast,
)
from ..forecast.stored_simulations import ANSWERS_AGAIN, store_answers
from ..forecast.values import EngineSpec, PartitionedBuild, RungForecast, Simulation, Simulator, StartSimulator
from ..journal import TrialStore, trial_key
from ..runner.cleanup import simulator_variables
from ..types import Fit, ModelFacts, Outcome, OutOfMemory, Record, Tier, Trial, WorkloadSource
from .forecaster import NO_FORECASTER, Forecaster, StepForecast, describe_own_batch


def make_trial_engine(settings: Settings, facts: ModelFacts, trial: Trial) -> EngineSpec:
    """The engine to simulate for a trial of these settings, which have the config that the survey saw."""
    zero_init = settings.source.zero_init
    return make_engine(settings.site, settings.rung(trial.rung), trial.knobs, facts, zero_init=zero_init)


def make_limited_engine(settings: Settings, facts: ModelFacts, trial: Trial) -> EngineSpec:
    """The same on a device with as many bytes as the trial's ranks may use."""
    spec = make_trial_engine(settings, facts, trial)
    return limit_engine(spec, settings.find_limit(trial.knobs)) if trial.limited else spec


def limit_engine(spec: EngineSpec, device_bytes: float) -> EngineSpec:
    """The same engine on a device with so many bytes."""
    if spec.machine is None:
        return spec
    return replace(spec, machine=replace(spec.machine, device_bytes=int(device_bytes)))


_BEING_DONE = ("autods fit", "--no-forecast")  # by a fit, where there is no forecast
_LARGEST_FIRST_MICRO_BATCH = 8  # as the walk of the ladder, which tries no larger one first


@dataclass(slots=True)
class TrialForecaster(Forecaster):
    """Forecasts the trials of a fit, corrected by the trials' measurements.

    A simulation that fails is reported once, by `report`, and leaves its trials without a forecast.
    A model may refuse so few samples: the forecast is then that of a larger micro batch.

    `settings` and `facts` are those of a surveyed workload. `observations` are by the keys of their trials.
    """

    cache: SimulationCache
    settings: Settings
    facts: ModelFacts
    report: Callable[[str], None]
    own_batch: int | None = None
    observations: dict[str, Observation] = field(default_factory=dict)
    forecasts: dict[str, RungForecast] = field(default_factory=dict)
    _tried: set[str] = field(default_factory=set)  # rungs
    _failed: dict[tuple[str, int], AutodsError] = field(default_factory=dict)
    _reported: set[str] = field(default_factory=set)
    _expandable: dict[tuple[str, int], bool] = field(default_factory=dict)  # by `memory_key` and micro batch
    _kept: dict[tuple[str, int], bool] = field(default_factory=dict)  # which of them keep the headroom
    _judged: dict[tuple[object, ...], RungForecast] = field(default_factory=dict)  # by what they depend on
    _replays: dict[tuple[object, ...], Replay | None] = field(default_factory=dict)  # likewise
    _least: int = 1  # the model cannot be trained with a smaller micro batch

    def prepare(self, trials: Iterable[Trial]) -> None:
        """Simulate these trials side by side, so that their forecasts are at hand."""

        def try_to_simulate(trial: Trial) -> None:
            with contextlib.suppress(AutodsError):  # its forecast tells
                self._simulate(trial)

        with ThreadPoolExecutor(count_parallel_engines()) as pool:
            list(pool.map(try_to_simulate, map(self._with_least, trials)))

    def forecast(self, trial: Trial) -> RungForecast | None:
        """Return the memory that the trial will need; None when it cannot be simulated."""
        trial = self._with_least(trial)
        spec, micro_batch = make_trial_engine(self.settings, self.facts, trial), trial.knobs.micro_batch
        try:
            simulation = self._simulate(trial)
        except AutodsError as error:
            return self.forecast(trial) if self._can_retry(trial.rung, micro_batch, error) else None
        forecast = self._judge(spec, simulation)
        first, is_tried = self.forecasts.get(trial.rung), trial.rung in self._tried
        is_smaller = first is not None and forecast.micro_batch < first.micro_batch and not is_tried
        if first is None or is_smaller or (forecast.offloads_inputs > first.offloads_inputs):
            self.forecasts[trial.rung] = forecast
        return forecast

    def largest(self, trial: Trial, sizes: Sequence[int], usable_bytes: float) -> int | None:
        """Return the largest micro batch that should fit in `usable_bytes` of the device; None when unknown.

        Where its allocator should run full and find no memory without the headroom, it is the largest that does not.
        """
        sizes = self._allow(sizes)
        spec = limit_engine(make_trial_engine(self.settings, self.facts, trial), usable_bytes)
        try:
            with self.cache.open(spec) as engine:
                largest = engine.find_largest(sizes, observations=tuple(self.observations.values())).micro_batch
        except AutodsError as error:
            smallest = min(sizes, default=_LARGEST_FIRST_MICRO_BATCH)
            return self.largest(trial, sizes, usable_bytes) if self._can_retry(trial.rung, smallest, error) else None
        if largest is None:
            return None

        def lacks_room(size: int) -> bool:
            sized = replace(trial, knobs=replace(trial.knobs, micro_batch=size))
            return not self._runs_well(sized) and not self._should_keep_headroom(sized)

        return find_last(sizes[: bisect_right(sizes, largest)], lacks_room) or largest

    def largest_calm(self, trial: Trial, sizes: Sequence[int]) -> int | None:
        """Return the largest micro batch at which the allocator should not run full; None where it should at all."""

        def is_full(size: int) -> bool:
            return not self._runs_well(replace(trial, knobs=replace(trial.knobs, micro_batch=size)))

        return find_last(self._allow(sizes), is_full)

    def find_fills(self, trial: Trial, micro_batch: int, usable_bytes: float) -> Fills | None:
        """Return the peaks at a micro batch over their limits, as two simulations tell; None where they do not."""
        spec = limit_engine(make_trial_engine(self.settings, self.facts, trial), usable_bytes)
        try:
            with self.cache.open(spec) as engine:
                engine.simulate(self._least)
                simulation = engine.foresee(micro_batch)
        except AutodsError:
            return None
        if simulation is None:
            return None
        return self._judge(spec, simulation, advise=False, roughly=True).fills

    def _runs_well(self, trial: Trial) -> bool:
        """Whether the trial's allocator should neither run out nor full; True when unknown."""
        replayed = self._replay(trial)
        return replayed is None or replayed.runs_well

    def _judge(
        self,
        spec: EngineSpec,
        simulation: Simulation,
        *,
        advise: bool = True,
        chooses: bool = True,
        roughly: bool = False,
    ) -> RungForecast:
        """Judge an engine after the trials so far, once: it takes dozens of replays."""
        machine_bytes = None if spec.machine is None else spec.machine.device_bytes
        engine = memory_key(spec), simulation.micro_batch, spec.expandable, machine_bytes
        key = *engine, advise, chooses, roughly, len(self.observations)
        if key not in self._judged:
            self._judged[key] = self.cache.judge(
                spec, simulation, self.observations.values(), advise=advise, chooses=chooses, roughly=roughly
            )
        return self._judged[key]

    def _replay(self, trial: Trial) -> Replay | None:
        """The replay of the trial's allocations at its limit; None where nothing is known of them."""
        spec, micro_batch = make_limited_engine(self.settings, self.facts, trial), trial.knobs.micro_batch
        if not find_device(spec.device).has_caching_allocator:
            return None
        try:
            simulation = self._simulate(trial)
        except AutodsError:
            return None
        known = self._expandable.get(config := (memory_key(spec), micro_batch))
        forecast = self._judge(
            replace(spec, expandable=bool(known or spec.expandable)),
            simulation,
            advise=False,
            chooses=known is None,
            roughly=True,
        )
        limit_bytes = forecast.memory["device"].limit_bytes if "device" in forecast.memory else None
        key = *config, forecast.expandable, forecast.overhead_bytes, limit_bytes
        if key not in self._replays:
            self._replays[key] = replay_at_limit(spec, simulation, forecast)
        return self._replays[key]

    def choose_allocator(self, trial: Trial) -> Trial:
        """Return the trial with the allocator that its forecast needs. A config keeps the first choice.

        Its segments grow where it would lack memory otherwise. It keeps out of the headroom where it should run full,
        and can do without.
        """
        spec, micro_batch = make_trial_engine(self.settings, self.facts, trial), trial.knobs.micro_batch
        key, knobs = (memory_key(spec), micro_batch), trial.knobs
        if not find_device(spec.device).has_caching_allocator or why_not_forecast(self.facts) is not None:
            return trial
        simulation = None
        with contextlib.suppress(AutodsError):  # its forecast tells
            simulation = self._simulate(trial)
        if self.cache.expandable is None:
            if key not in self._expandable and simulation is not None:
                forecast = self._judge(spec, simulation, advise=False)
                self._expandable[key] = forecast.expandable
            knobs = replace(knobs, expandable=self._expandable.get(key, knobs.expandable))
        if trial.limited and not knobs.keeps_headroom:
            if key not in self._kept and simulation is not None:
                self._kept[key] = self._should_keep_headroom(trial)
            knobs = replace(knobs, keeps_headroom=self._kept.get(key, False))
        return replace(trial, knobs=knobs)

    def _should_keep_headroom(self, trial: Trial) -> bool:
        """Whether the trial's allocator should not run well on the whole device, and run without the headroom."""
        spec, micro_batch = make_trial_engine(self.settings, self.facts, trial), trial.knobs.micro_batch
        simulation = self.cache.get(spec, micro_batch)
        # Blocks that come back late fill a device with what it could do without; no other rung runs full for long.
        if simulation is None or not simulation.traces["device"].held or self._runs_well(trial):
            return False
        replayed = self._replay(trial.without_headroom())
        return replayed is not None and replayed.ran_out is None

    def step_time(self, trial: Trial) -> StepForecast | None:
        """Return the seconds of the trial's step, corrected by the trials so far; None when it cannot be forecast.

        The step is that of `trial.knobs.accumulation` micro batches. It costs a simulation unless `largest` made it.
        """
        parts = self._step_parts(trial)
        if parts is None:
            return None
        step, low_share, least_s = parts
        factors = self.step_factors()
        seconds = factors.correct(step)
        return StepForecast(
            seconds=max(seconds, least_s),
            low_seconds=max(low_share * seconds, least_s),
            computed_seconds=factors.compute * step.computed_s,
            copied_seconds=factors.link * step.copied_s,
        )

    def propose_partitioned_build(
        self, trials: Iterable[Trial], ran_out: Mapping[str, Tier]
    ) -> PartitionedBuild | None:
        """Return what `--zero-init` gives those of the trials that lack memory to build; None where it helps none."""
        forecasts = ((self._with_least(trial), self.forecast(trial)) for trial in trials)
        rungs = [
            (make_trial_engine(self.settings, self.facts, trial), forecast)
            for trial, forecast in forecasts
            if forecast is not None
        ]
        observations = tuple(self.observations.values())
        return find_partitioned_build(self.cache, rungs, self.facts, self.settings.source.form, observations, ran_out)

    def step_factors(self) -> StepFactors:
        """Return the machine's factors after the trials so far."""
        return fit_step_factors(self.observations.values(), StepFactors())

    def learn(self, trial: Trial, outcome: Outcome) -> Observation | None:
        """Store the trial's peak with its forecast, and return both; None if the trial shows nothing new."""
        spec, key = make_trial_engine(self.settings, self.facts, trial), trial_key(trial)
        if trial.knobs.keeps_headroom and isinstance(outcome, OutOfMemory):
            self._kept[memory_key(spec), trial.knobs.micro_batch] = False  # if it is tried again, on the whole device
        simulation = self.cache.get(spec, trial.knobs.micro_batch)
        if simulation is None or key in self.observations:
            return None
        if trial.rung not in self._tried:
            self._tried.add(trial.rung)
            self.forecasts[trial.rung] = self._judge(spec, simulation)
        observation = observe_trial(
            spec, simulation, outcome, expandable=bool(spec.expandable or self.cache.expandable)
        )
        if observation is not None:
            observation = replace(observation, step=self._observe_step(trial, outcome))
            self.observations[key] = observation
        return observation

    def _observe_step(self, trial: Trial, outcome: Outcome) -> StepObservation | None:
        if not (isinstance(outcome, Fit) and len(outcome.step_s) > 1 and trial.exam is None):
            return None  # a single step may be the one in which the allocator grows
        if outcome.alloc_retries:
            return None  # what they cost is a guess, and tells nothing of steps without any
        parts = self._step_parts(trial)
        if parts is None:
            return None
        return StepObservation(parts=parts[0], measured_s=statistics.median(outcome.step_s))

    def _step_parts(self, trial: Trial) -> tuple[StepParts, float, float] | None:
        """The step before calibration, the low end of its interval as a share of it, and its seconds at peak rates."""
        if self.settings.machine.rates is None or self.forecast(trial) is None:
            return None
        trial = self._with_least(trial)
        spec, knobs = make_trial_engine(self.settings, self.facts, trial), trial.knobs
        simulation = self.cache.get(spec, knobs.micro_batch)
        if simulation is None or simulation.schedule is None:
            return None
        replayed = None
        if knobs.keeps_headroom or self._should_keep_headroom(trial):
            replayed = self._replay(trial.without_headroom())
        returned = 0 if replayed is None else replayed.late_returned
        speed = forecast_speed(spec, simulation, accumulation=knobs.accumulation, returned=returned)
        if speed is None:
            return None
        least_s = low_share = 0.0
        if not simulation.is_upper_bound:
            low_share = speed.step.low_seconds / speed.step.seconds
            least_s = least_step_s(
                simulation.schedule,
                self.settings.machine,
                ranks_per_node=spec.ranks_of_node,
                accumulation=knobs.accumulation,
            )
        spent = speed.step.spent
        launched_s, moved_s = spent["launch"], spent["communication"] + spent["host"]
        computed_s = speed.step.seconds - launched_s - moved_s
        issued_s = speed.step.issued_seconds
        parts = StepParts(
            computed_s=computed_s, launched_s=launched_s, moved_s=moved_s, copied_s=spent["host"], issued_s=issued_s
        )
        return parts, low_share, least_s

    def _simulate(self, trial: Trial) -> Simulation:
        """Simulate the trial, at most once: what it raised then is raised again."""
        spec, micro_batch = make_trial_engine(self.settings, self.facts, trial), trial.knobs.micro_batch
        key = memory_key(spec), micro_batch
        if key in self._failed:
            raise self._failed[key]
        try:
            return self.cache.simulate(spec, micro_batch)
        except AutodsError as error:
            self._failed[key] = error
            raise

    def _with_least(self, trial: Trial) -> Trial:
        size = self.own_batch or max(self._least, trial.knobs.micro_batch)
        return replace(trial, knobs=replace(trial.knobs, micro_batch=size))

    def _allow(self, sizes: Sequence[int]) -> Sequence[int]:
        return [size for size in sizes if size >= self._least] if self.own_batch is None else [self.own_batch]

    def _can_retry(self, rung: str, micro_batch: int, error: AutodsError) -> bool:
        """Take the script's own micro batch, or double one of too few samples for the model; else report the error."""
        if isinstance(error, SimulationFailed) and self.own_batch is None and error.own_batch is not None:
            self.own_batch = self._least = error.own_batch
            self.report(describe_own_batch(error.own_batch))
            return True
        may_grow = self.own_batch is None and micro_batch < _LARGEST_FIRST_MICRO_BATCH
        if may_grow and wants_larger_batch(str(error)):
            self._least = max(self._least, 2 * micro_batch)
            return True
        problem, _, hint = str(error).partition("\n")
        hint = keep_alternatives(hint, lambda text: not any(way in text for way in _BEING_DONE))
        reason = "; ".join(" ".join(text.split()).rstrip(".") for text in (problem, hint) if text.strip())
        if reason not in self._reported:
            self._reported.add(reason)
            self.report(f"no forecast of {rung}, so it is tried: {reason}")
        return False


def start_processes(settings: Settings, listen: Listener) -> StartSimulator:
    """Return the start of a simulator that waits as long as the profile of these settings allows, and reports waits."""

    def start(source: WorkloadSource) -> contextlib.AbstractContextManager[Simulator]:
        processes = ProcessSimulator(
            source,
            limit_s=settings.profile.limits.init_s,
            report=lambda text: listen(Note(text=text, passing=True)),
            variables=simulator_variables(),
        )
        return store_answers(processes, source, note_use=lambda: listen(Note(text=ANSWERS_AGAIN, passing=True)))

    return start


@contextlib.contextmanager
def open_forecaster(
    settings: Settings,
    facts: ModelFacts,
    memory: TrialStore,
    listen: Listener,
    start: StartSimulator | None = None,
) -> Iterator[Forecaster]:
    """A forecaster of this fit's trials; one that knows nothing when the settings want no forecast.

    The simulator starts with the first forecast. Each trial corrects the forecasts after it, also when the journal
    answers it: so a resumed fit decides as its first run did.
    """
    if not settings.forecast:
        yield NO_FORECASTER
        return
    allocator = read_alloc_conf(os.environ, settings.device)
    if allocator.warning is not None:
        listen(Note(text=allocator.warning))

    def learn(record: Record) -> None:
        is_saved = isinstance(record.outcome, Fit) and record.outcome.examined is not None
        if not is_saved or find_device(settings.device).shares_host_memory:  # there, it passes beside the budget
            forecaster.learn(record.trial, record.outcome)
        # Otherwise its peak includes saving a checkpoint, which is not forecast.

    with (start or start_processes(settings, listen))(settings.source) as simulator:
        forecaster = TrialForecaster(
            cache=SimulationCache(simulator, allocator.expandable),
            settings=settings,
            facts=facts,
            report=lambda text: listen(Note(text=text, passing=True)),
        )
        memory.learn = learn
        yield forecaster
