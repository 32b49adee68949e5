"""The forecast of each cell's largest micro batch: it comes before the trials, or stands for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

from ..config.deepspeed import compose, count_replicas, micro_batches
from ..config.plan_settings import NVME_PLACE, spread_ranks
from ..config.settings import Settings
from ..devices import find_device
from ..events import Listener, Note
from ..forecast.largest_batch import MOST_MICRO_BATCH
from ..forecast.simulate.client import ProcessSimulator
from ..forecast.simulate.protocol import SimulationFailed
from ..forecast.simulation_cache import (
    PARALLEL_ENGINES,
    SimulationCache,
    make_engine,
    read_alloc_conf,
    why_not_forecast,
)
from ..forecast.stored_simulations import store_answers
from ..forecast.values import Simulator, StartSimulator
from ..journal import TrialStore, trial_key
from ..schema import read_as
from ..types import Knobs, ModelFacts, Scalar, Trial, WorkloadSource
from ..workload.conditions import apply_to_source
from .grid import settings_under_conditions
from .probe_settings import ProbeSettings

_MOST_SIMULATORS = 3  # that are open at a time


class Simulators:
    """Simulators by workload. Each starts when it is needed, and a few stay open for the next use."""

    def __init__(self, start: StartSimulator | None = None) -> None:
        self._start = start or (lambda source: store_answers(ProcessSimulator(source), source))
        self._open: dict[str, tuple[Simulator, ExitStack]] = {}

    def get(self, source: WorkloadSource) -> Simulator:
        if source.digest not in self._open:
            while len(self._open) >= _MOST_SIMULATORS:
                self._open.pop(next(iter(self._open)))[1].close()
            stack = ExitStack()
            self._open[source.digest] = stack.enter_context(self._start(source)), stack
        return self._open[source.digest][0]

    def close(self) -> None:
        """End them all: none may run during trials."""
        while self._open:
            self._open.popitem()[1][1].close()


# From conditions to the facts of the model under them.
FactsUnder = Callable[[Mapping[str, Scalar]], ModelFacts]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityForecast:
    """The largest micro batch that fits by the forecast; None when none does, for this `reason`.

    `simulated` is False when the engine cannot be simulated.
    """

    largest: int | None
    reason: str = ""
    simulated: bool = True


def forecast_cells(
    question: ProbeSettings,
    trials: Mapping[int, Trial],
    *,
    facts: FactsUnder,
    simulators: Simulators,
    store: TrialStore,
    listen: Listener,
) -> dict[int, CapacityForecast]:
    """Return the forecast of each cell by its number: from the journal, or simulated now and written there."""
    forecasts: dict[int, CapacityForecast] = {}
    by_source: dict[str, tuple[WorkloadSource, list[int]]] = {}
    for number, trial in trials.items():
        if (row := store.past.forecasts.get(trial_key(trial))) is not None:
            forecasts[number] = read_as(CapacityForecast, row)
        elif not question.settings.forecast:
            forecasts[number] = CapacityForecast(largest=None)
        else:
            source = source_under_conditions(question, trial.conditions)
            by_source.setdefault(source.digest, (source, []))[1].append(number)
    expandable = bool(read_alloc_conf(os.environ, question.settings.device).expandable)
    for source, numbers in by_source.values():
        cache = SimulationCache(simulators.get(source), expandable)
        pool = ThreadPoolExecutor(PARALLEL_ENGINES, thread_name_prefix="forecast")
        try:
            tasks = {
                pool.submit(_forecast_cell, question, trials[number], facts(trials[number].conditions), cache): number
                for number in numbers
            }
            for task in as_completed(tasks):
                number, forecast = tasks[task], task.result()
                forecasts[number] = forecast
                store.journal.write_forecast(trials[number], asdict(forecast))
                result = f"up to micro batch {forecast.largest}" if forecast.largest else forecast.reason
                listen(Note(text=f"forecast of cell {number}, {trials[number].rung}: {result}"))
        finally:
            # Threads are not waited for: leaving the simulator ends its processes, and then the threads end.
            pool.shutdown(wait=False, cancel_futures=True)
    simulators.close()
    return forecasts


def _forecast_cell(
    question: ProbeSettings, trial: Trial, facts: ModelFacts, cache: SimulationCache
) -> CapacityForecast:
    if (reason := why_not_forecast(facts)) is not None:
        return CapacityForecast(largest=None, reason=f"cannot be simulated: {reason}", simulated=False)
    machine, settings = question.machine, settings_under_conditions(question, trial.conditions, facts)
    site = settings.site
    if machine is not None:
        site = replace(site, ranks_per_node=spread_ranks(settings.gpus, None, machine, find_device(settings.device))[1])
    spec = make_engine(site, settings.rung(trial.rung), trial.knobs, facts, zero_init=settings.source.zero_init)
    try:
        with cache.open(spec) as engine:
            largest = engine.find_largest(list_micro_batches(settings, facts))
            if largest.micro_batch is None:
                return CapacityForecast(largest=None, reason=engine.forecast(min(largest.measured)).reason)
    except SimulationFailed as failed:
        reason = f"cannot be simulated: {' '.join(str(failed.problem).split())}"
        return CapacityForecast(largest=None, reason=reason, simulated=False)
    reason = ""
    if largest.failures:
        size, why = list(largest.failures.items())[-1]
        reason = f"{largest.micro_batch} fits; {size} cannot be simulated: {why}"
    return CapacityForecast(largest=largest.micro_batch, reason=reason)


def source_under_conditions(question: ProbeSettings, conditions: Mapping[str, Scalar]) -> WorkloadSource:
    """Return the workload under these conditions.

    A script gets the first rung's config in place of `{ds_config}`, until the config that it brings is known.
    """
    settings = question.settings
    source = apply_to_source(settings.source, conditions)
    if not source.form.brings_config:
        return source
    site = replace(settings.site, world_size=1, nvme_path=settings.nvme_path or NVME_PLACE)
    config = compose(settings.ladder[0], Knobs(), site, None)
    return replace(source, base_config=config)


def list_micro_batches(settings: Settings, facts: ModelFacts) -> Sequence[int]:
    """Return the micro batches that a cell may have, ascending."""
    most = min(settings.profile.grow.most_micro_batch, MOST_MICRO_BATCH)
    return micro_batches(settings.global_batch, count_replicas(settings.base, settings.gpus, facts), most)
