"""The largest micro batch of each cell by the simulated device: first of all, and where the machine is not here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ..config.deepspeed import compose, without_monitors
from ..events import Listener, Note
from ..forecast.batch_search import MOST_MICRO_BATCH, largest
from ..forecast.simulator.client import SimulationFailed
from ..forecast.simulator.client import Simulator as ProcessSimulator
from ..forecast.values import EngineSpec, RungForecast, Simulator, StartSimulator
from ..forecast.verdict import judge_memory
from ..settings import NVME_PLACE
from ..tuner.candidates import why_not_forecast
from ..tuner.trials import micro_batches
from ..types import Device, Knobs, ModelFacts, Scalar, Tier, Trial, WorkloadSource
from ..workload.conditions import apply_conditions, apply_to_source
from .grid import Cell, config_of, settings_of
from .request import Question

NOT_SIMULATED = "cannot be simulated"
_PROCESSES = 2  # engines simulated at a time
_MOST_OPEN = 3  # simulators at a time
_ENOUGH_ACCUMULATION = 2  # more repeats the second micro batch, the first that runs beside kept gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """The largest micro batch that fits by the forecast; None: none does, or it cannot be said, see `reason`."""

    largest: int | None
    reason: str = ""


class Simulators:
    """One for each kind of workload, started when it is needed; a few stay, for the next that is asked of it."""

    def __init__(self, device: Device, start: StartSimulator | None = None) -> None:
        self._device, self._start = device, start
        self._open: dict[str, tuple[Simulator, ExitStack]] = {}
        self._facts: dict[str, ModelFacts] = {}

    def of(self, source: WorkloadSource) -> Simulator:
        """The simulator of this workload."""
        if source.digest not in self._open:
            while len(self._open) >= _MOST_OPEN:
                self._open.pop(next(iter(self._open)))[1].close()
            stack = ExitStack()
            self._open[source.digest] = stack.enter_context((self._start or ProcessSimulator)(source)), stack
        return self._open[source.digest][0]

    def facts(self, source: WorkloadSource) -> ModelFacts:
        """What the workload is, where no rank can look; asked once."""
        if source.digest not in self._facts:
            self._facts[source.digest] = self.of(source).facts(self._device)
        return self._facts[source.digest]

    def close(self) -> None:
        """End them all: nothing of them may run beside trials."""
        while self._open:
            self._open.popitem()[1][1].close()


Facts = Callable[[Mapping[str, Scalar]], ModelFacts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecasts:
    """Forecasts of the cells of one question.

    known: key of a trial → what an earlier run of the probe found; kept: told of each new one.
    """

    question: Question
    facts: Facts
    listen: Listener
    simulators: Simulators

    def of(
        self, cells: Sequence[Cell], known: Mapping[int, Foreseen], kept: Callable[[Cell, Foreseen], None]
    ) -> dict[int, Foreseen]:
        """Cell → the forecast, of all that are neither refused nor the same as another."""
        found = dict(known)
        missing = [one for one in cells if one.trial is not None and one.same_as is None and one.number not in found]
        sources: dict[str, tuple[WorkloadSource, list[Cell]]] = {}
        for cell in missing:
            assert cell.trial is not None
            source = to_look_at(self.question, cell.trial.conditions)
            sources.setdefault(source.digest, (source, []))[1].append(cell)
        for source, ours in sources.values():
            for cell, foreseen in self._each(self.simulators.of(source), ours):
                found[cell.number] = foreseen
                kept(cell, foreseen)
                said = f"up to micro batch {foreseen.largest}" if foreseen.largest else foreseen.reason
                self.listen(Note(text=f"forecast of cell {cell.number}, {cell.rung}: {said}"))
        self.simulators.close()
        return found

    def _each(self, simulator: Simulator, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Foreseen]]:
        """Some at a time. Leaving the simulator ends its processes, and with them whoever waits for an answer."""
        pool = ThreadPoolExecutor(_PROCESSES, thread_name_prefix="forecast")
        try:
            tasks = {pool.submit(self._one, simulator, cell): cell for cell in cells}
            left = set(tasks)
            while left:
                done, left = wait(left, return_when=FIRST_EXCEPTION, timeout=0.2)
                for task in done:
                    yield tasks[task], task.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _one(self, simulator: Simulator, cell: Cell) -> Foreseen:
        assert cell.trial is not None
        trial = cell.trial
        if (reason := why_not_forecast(self.facts(trial.conditions))) is not None:
            return Foreseen(largest=None, reason=f"{NOT_SIMULATED}: {reason}")
        ask = self._ask(trial)
        sizes = sizes_of(self.question, trial, self.facts(trial.conditions))
        said: dict[int, RungForecast] = {}
        beyond: list[str] = []  # why larger ones cannot be simulated: the data of a script may end, say
        try:
            with simulator.engine(ask) as engine:

                def fill(size: int) -> float:
                    try:
                        simulated = engine.measure(size)
                    except SimulationFailed as failed:
                        if not said:
                            raise
                        beyond.append(f"; {size} {NOT_SIMULATED}: {' '.join(str(failed.what).split())}")
                        return math.inf
                    said[size] = judge_memory(ask, simulated, limits=self._limits(), emulated=self._emulated)
                    return said[size].fill

                found = largest(fill, sizes)
        except SimulationFailed as failed:
            return Foreseen(largest=None, reason=f"{NOT_SIMULATED}: {' '.join(str(failed.what).split())}")
        if found.micro_batch is None:
            return Foreseen(largest=None, reason=said[min(said)].reason)
        return Foreseen(largest=found.micro_batch, reason=f"{found.micro_batch} fits{beyond[-1]}" if beyond else "")

    def _ask(self, trial: Trial) -> EngineSpec:
        settings, machine = self.question.settings, self.question.machine
        accumulation = min(_ENOUGH_ACCUMULATION, trial.knobs.accumulation)
        trial = replace(trial, knobs=replace(trial.knobs, accumulation=accumulation))
        ranks = apply_conditions(settings, trial.conditions).gpus
        stage = next(rung.stage for rung in settings.ladder if rung.name == trial.rung)
        return EngineSpec(
            rung=trial.rung,
            zero_init=settings.source.zero_init and stage == 3,
            ds_config=without_monitors(config_of(self.question, trial, self.facts(trial.conditions))),
            world_size=ranks,
            ranks_per_node=min(ranks, (machine.gpus if machine is not None else None) or settings.ranks_per_node),
            device_bytes=settings.device_bytes,
            device=settings.device,
            checkpointing=trial.knobs.checkpointing,
        )

    @property
    def _emulated(self) -> bool:
        settings = self.question.settings
        return settings.device == "cpu" or (settings.device_bytes_asked and self.question.machine is None)

    def _limits(self) -> Mapping[Tier, int]:
        """Where they are known; budgets of CPU ranks are all that is enforced on them."""
        settings, machine = self.question.settings, self.question.machine
        limits: dict[Tier, int] = {"device": settings.device_bytes}
        if settings.device == "cuda" and machine is not None and machine.host_bytes is not None:
            limits["host"] = machine.host_bytes
        if machine is not None and machine.nvme_bytes is not None:
            limits["nvme"] = machine.nvme_bytes
        return limits


def to_look_at(question: Question, conditions: Mapping[str, Scalar]) -> WorkloadSource:
    """The workload under these conditions; a script with what its `{ds_config}` holds until its own config is known."""
    settings = question.settings
    source = apply_to_source(settings.source, conditions)
    if source.kind != "script":
        return source
    path = settings.nvme_path or NVME_PLACE
    first = compose(settings.ladder[0], Knobs(), base=settings.base, world_size=1, own_optimizer=False, nvme_path=path)
    return replace(source, base_config=first)


def sizes_of(question: Question, trial: Trial, facts: ModelFacts) -> Sequence[int]:
    """The micro batches of a cell, ascending."""
    settings = settings_of(question, trial.conditions, facts)
    most = min(settings.profile.grow.most_micro_batch, MOST_MICRO_BATCH)
    return micro_batches(settings.global_batch, facts.replicas(settings.gpus), most)
