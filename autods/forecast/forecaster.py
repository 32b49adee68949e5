"""Forecasts of a fit's trials, corrected by what its trials measured; `tuner.forecasts.Forecaster` for real."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace

from ..config.deepspeed import BATCH_KEYS
from ..diagnosis.trial_outcome import wants_larger_batch
from ..errors import AutodsError
from ..types import Outcome, Tier, Trial
from .batch_search import largest
from .calibration import Observation, calibrate_forecast, observe_trial
from .values import Engine, EngineSpec, RungForecast, Simulation, Simulator
from .verdict import judge_memory

_AT_A_TIME = 2  # engines
_LARGEST_BEGINNING = 8  # micro batch: as the walk, which tries no larger one first


@dataclass(slots=True)
class Foreseer:
    """What trials will need. A failure of the simulation is told once a rung, and then it foresees nothing there.
    Where a model cannot be trained with so few samples, the forecast is that of twice as many.

    ask_of: the engine that a trial runs. limits: bytes, device a rank, host a node. emulated: the device's limit is
    torch's, on a larger card. pairs: key of a trial → forecast and measured; those of an earlier run of the fit count.
    expandable: the trials' allocator has expandable segments, see `read_alloc_conf`.
    """

    simulator: Simulator
    ask_of: Callable[[Trial], EngineSpec]
    key_of: Callable[[Trial], str]
    limits: Mapping[Tier, int]
    emulated: bool
    tell: Callable[[str], None]
    pairs: dict[str, Observation] = field(default_factory=dict)
    expandable: bool = False
    said: dict[str, RungForecast] = field(default_factory=dict)  # the first forecast of each rung, for the report
    _seen: dict[str, Future[Simulation]] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)
    _least: int = 1  # micro batch: smaller ones cannot be trained
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_AT_A_TIME))

    def prepare(self, trials: Iterable[Trial]) -> None:
        """Begin with these, in this order, while other work goes on."""
        for trial in trials:
            self._future(self._trainable(trial))

    def settle(self) -> None:
        """Drop what has not begun and wait for what has: timed trials want a quiet machine."""
        with self._lock:
            self._seen = {key: future for key, future in self._seen.items() if not future.cancel()}
        for future in tuple(self._seen.values()):
            future.exception()

    def close(self) -> None:
        """At the end; what is under way ends with the simulator."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def forecast(self, trial: Trial) -> RungForecast | None:
        """What the trial will need; None when it cannot be simulated."""
        trial = self._trainable(trial)
        while (simulated := self._simulated(trial)) is None:
            if trial.knobs.micro_batch >= self._least:
                return None
            trial = self._trainable(trial)
        forecast = self._judged(self.ask_of(trial), simulated)
        self.said.setdefault(trial.rung, forecast)
        return forecast

    def largest(self, trial: Trial, sizes: Sequence[int], usable_bytes: float) -> int | None:
        """The largest micro batch expected to stay within the usable memory, on one engine."""
        ask = self.ask_of(trial)
        sizes = [size for size in sizes if size >= self._least]
        seen: list[int] = []

        def fill(size: int, engine: Engine) -> float:
            try:
                simulated = engine.measure(size)
            except AutodsError:
                if not seen:
                    raise
                return math.inf  # a script's data may end before so large a batch is full
            seen.append(size)
            self._keep(replace(trial, knobs=replace(trial.knobs, micro_batch=size)), simulated)
            memory = self._judged(ask, simulated).memory
            device = replace(memory["device"], limit_bytes=int(usable_bytes))
            return max(held.fill for held in {**memory, "device": device}.values())

        try:
            with self.simulator.engine(ask) as engine:
                return largest(lambda size: fill(size, engine), sizes).micro_batch
        except AutodsError as error:
            if sizes and self._wants_more(sizes[0], error):
                return self.largest(trial, sizes, usable_bytes)
            self._failed(trial.rung, error)
            return None

    def learn(self, trial: Trial, outcome: Outcome) -> Observation | None:
        """What a trial adds to what is known of this machine, where its forecast is at hand."""
        future = self._seen.get(self._key(trial))
        key = self.key_of(trial)
        if future is None or not future.done() or future.cancelled() or future.exception() or key in self.pairs:
            return None
        pair = observe_trial(self.ask_of(trial), future.result(), outcome, expandable=self.expandable)
        if pair is None:
            return None
        self.pairs[key] = pair
        return pair

    def _judged(self, ask: EngineSpec, simulated: Simulation) -> RungForecast:
        calibration = calibrate_forecast(ask, self.pairs.values())
        return judge_memory(
            ask, simulated, limits=self.limits, emulated=self.emulated, calibration=calibration,
            expandable=self.expandable,
        )  # fmt: skip

    def _simulated(self, trial: Trial) -> Simulation | None:
        try:
            return self._future(trial).result()
        except AutodsError as error:
            if not self._wants_more(trial.knobs.micro_batch, error):
                self._failed(trial.rung, error)
            return None

    def _wants_more(self, micro_batch: int, error: AutodsError) -> bool:
        """Whether twice as many samples may do where these were too few for the model."""
        if micro_batch >= _LARGEST_BEGINNING or not wants_larger_batch(str(error)):
            return False
        self._least = max(self._least, 2 * micro_batch)
        return True

    def _trainable(self, trial: Trial) -> Trial:
        return replace(trial, knobs=replace(trial.knobs, micro_batch=max(self._least, trial.knobs.micro_batch)))

    def _future(self, trial: Trial) -> Future[Simulation]:
        key = self._key(trial)
        with self._lock:
            if key not in self._seen:
                self._seen[key] = self._pool.submit(self._simulate, trial)
            return self._seen[key]

    def _simulate(self, trial: Trial) -> Simulation:
        return self.simulator.simulate(self.ask_of(trial), [trial.knobs.micro_batch])[0]

    def _keep(self, trial: Trial, simulated: Simulation) -> None:
        future: Future[Simulation] = Future()
        future.set_result(simulated)
        with self._lock:
            self._seen[self._key(trial)] = future

    def _key(self, trial: Trial) -> str:
        """Equal for trials that allocate the same: more accumulation than two micro batches adds nothing."""
        ask = self.ask_of(trial)
        config = {name: value for name, value in ask.ds_config.items() if name not in BATCH_KEYS}
        shape = {"micro_batch": trial.knobs.micro_batch, "accumulates": trial.knobs.accumulation > 1}
        return json.dumps({**asdict(ask), "ds_config": config, **shape}, sort_keys=True, default=str)

    def _failed(self, rung: str, error: AutodsError) -> None:
        said = "; ".join(" ".join(line.split()) for line in str(error).splitlines())
        if said not in self._told:
            self._told.add(said)
            self.tell(f"no forecast of {rung}, so it is tried: {said}")
