"""The forecast of each cell's largest micro batch: it comes before the trials, or stands for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ..config.deepspeed import compose, without_monitors
from ..config.plan_settings import NVME_PLACE
from ..events import Listener, Note
from ..forecast.allocator import read_alloc_conf
from ..forecast.forecaster import ENOUGH_ACCUMULATION, MOST_MICRO_BATCH, PARALLEL_ENGINES, Forecaster, Limits
from ..forecast.simulator.client import SimulationFailed
from ..forecast.simulator.client import Simulator as ProcessSimulator
from ..forecast.values import EngineSpec, Simulator, StartSimulator
from ..tuner.candidates import why_not_forecast
from ..tuner.trials import micro_batches
from ..types import Device, Knobs, ModelFacts, Scalar, Trial, WorkloadSource
from ..workload.conditions import apply_conditions, apply_to_source
from .grid import compose_cell_config, settings_under_conditions
from .request import ProbeSettings

NOT_SIMULATED = "cannot be simulated"
_MOST_SIMULATORS = 3  # that are open at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityForecast:
    """The largest micro batch that fits by the forecast; None when none does, for this `reason`.

    `simulated` is False when the engine cannot be simulated.
    """

    largest: int | None
    reason: str = ""
    simulated: bool = True


class Simulators:
    """Simulators by workload. Each starts when it is needed, and a few stay open for the next use."""

    def __init__(self, device: Device, start: StartSimulator | None = None) -> None:
        self._device, self._start = device, start
        self._open: dict[str, tuple[Simulator, ExitStack]] = {}
        self._facts: dict[str, ModelFacts] = {}

    def get(self, source: WorkloadSource) -> Simulator:
        """Return the simulator of this workload."""
        if source.digest not in self._open:
            while len(self._open) >= _MOST_SIMULATORS:
                self._open.pop(next(iter(self._open)))[1].close()
            stack = ExitStack()
            self._open[source.digest] = stack.enter_context((self._start or ProcessSimulator)(source)), stack
        return self._open[source.digest][0]

    def facts(self, source: WorkloadSource) -> ModelFacts:
        """Return the facts of this workload's model; they are read once."""
        if source.digest not in self._facts:
            self._facts[source.digest] = self.get(source).facts(self._device)
        return self._facts[source.digest]

    def close(self) -> None:
        """End them all: none may run during trials."""
        while self._open:
            self._open.popitem()[1][1].close()


FactsUnder = Callable[[Mapping[str, Scalar]], ModelFacts]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellForecaster:
    """Forecasts the largest micro batch of cells. `facts` returns the model's facts under some conditions."""

    question: ProbeSettings
    facts: FactsUnder
    listen: Listener
    simulators: Simulators

    def forecast(
        self, trials: Mapping[int, Trial], keep: Callable[[int, CapacityForecast], None]
    ) -> dict[int, CapacityForecast]:
        """Return the forecast of each cell by its number; `keep` gets each one as soon as it is known."""
        sources: dict[str, tuple[WorkloadSource, dict[int, Trial]]] = {}
        for number, trial in trials.items():
            source = source_under_conditions(self.question, trial.conditions)
            sources.setdefault(source.digest, (source, {}))[1][number] = trial
        forecasts: dict[int, CapacityForecast] = {}
        for source, its_trials in sources.values():
            for number, forecast in self._forecast_in_parallel(self.simulators.get(source), its_trials):
                forecasts[number] = forecast
                keep(number, forecast)
                result = f"up to micro batch {forecast.largest}" if forecast.largest else forecast.reason
                self.listen(Note(text=f"forecast of cell {number}, {trials[number].rung}: {result}"))
        self.simulators.close()
        return forecasts

    def _forecast_in_parallel(
        self, simulator: Simulator, trials: Mapping[int, Trial]
    ) -> Iterator[tuple[int, CapacityForecast]]:
        """Yield forecasts as they finish. Leaving the simulator ends its processes, and then the threads end."""
        expandable = self.question.settings.device == "cuda" and read_alloc_conf(os.environ).expandable
        forecaster = Forecaster(simulator, expandable)
        pool = ThreadPoolExecutor(PARALLEL_ENGINES, thread_name_prefix="forecast")
        try:
            tasks = {pool.submit(self._forecast_cell, forecaster, trial): number for number, trial in trials.items()}
            left = set(tasks)
            while left:
                done, left = wait(left, return_when=FIRST_EXCEPTION, timeout=0.2)
                for task in done:
                    yield tasks[task], task.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _forecast_cell(self, forecaster: Forecaster, trial: Trial) -> CapacityForecast:
        if (reason := why_not_forecast(self.facts(trial.conditions))) is not None:
            return _not_simulated(reason)
        sizes = list_micro_batches(self.question, trial, self.facts(trial.conditions))
        limits = self._limits()
        try:
            with forecaster.open(self._engine_spec(trial)) as engine:
                largest = engine.find_largest(sizes, limits)
                if largest.micro_batch is None:
                    reason = engine.forecast(min(largest.measured), limits).reason
                    return CapacityForecast(largest=None, reason=reason)
        except SimulationFailed as failed:
            return _not_simulated(" ".join(str(failed.problem).split()))
        reason = ""
        if largest.failures:
            size, why = list(largest.failures.items())[-1]
            reason = f"{largest.micro_batch} fits; {size} {NOT_SIMULATED}: {why}"
        return CapacityForecast(largest=largest.micro_batch, reason=reason)

    def _engine_spec(self, trial: Trial) -> EngineSpec:
        settings, machine = self.question.settings, self.question.machine
        accumulation = min(ENOUGH_ACCUMULATION, trial.knobs.accumulation)
        trial = replace(trial, knobs=replace(trial.knobs, accumulation=accumulation))
        ranks = apply_conditions(settings, trial.conditions).gpus
        stage = next(rung.stage for rung in settings.ladder if rung.name == trial.rung)
        return EngineSpec(
            rung=trial.rung,
            zero_init=settings.source.zero_init and stage == 3,
            ds_config=without_monitors(compose_cell_config(self.question, trial, self.facts(trial.conditions))),
            world_size=ranks,
            ranks_per_node=min(ranks, (machine.gpus if machine is not None else None) or settings.ranks_per_node),
            device_bytes=settings.device_bytes,
            device=settings.device,
            checkpointing=trial.knobs.checkpointing,
        )

    def _limits(self) -> Limits:
        settings, machine = self.question.settings, self.question.machine
        return Limits(
            device_bytes=settings.device_bytes,
            host_bytes=None if machine is None else machine.host_bytes,
            nvme_bytes=None if machine is None else machine.nvme_bytes,
            emulated=settings.device == "cpu" or (settings.device_bytes_asked and machine is None),
        )


def _not_simulated(reason: str) -> CapacityForecast:
    return CapacityForecast(largest=None, reason=f"{NOT_SIMULATED}: {reason}", simulated=False)


def source_under_conditions(question: ProbeSettings, conditions: Mapping[str, Scalar]) -> WorkloadSource:
    """Return the workload under these conditions.

    A script gets the first rung's config in place of `{ds_config}`, until the config that it brings is known.
    """
    settings = question.settings
    source = apply_to_source(settings.source, conditions)
    if source.kind != "script":
        return source
    path = settings.nvme_path or NVME_PLACE
    config = compose(settings.ladder[0], Knobs(), base=settings.base, world_size=1, own_optimizer=False, nvme_path=path)
    return replace(source, base_config=config)


def list_micro_batches(question: ProbeSettings, trial: Trial, facts: ModelFacts) -> Sequence[int]:
    """Return the micro batches that a cell may have, ascending."""
    settings = settings_under_conditions(question, trial.conditions, facts)
    most = min(settings.profile.grow.most_micro_batch, MOST_MICRO_BATCH)
    return micro_batches(settings.global_batch, facts.replicas(settings.gpus), most)
