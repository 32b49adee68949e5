"""Made-up machines and models for the search: nine rungs whose speed and memory behave as real ones do, with noise.

What is known: a step costs a fixed part (communication, the optimizer, offloading) and a part per sample; memory is a
line in the micro batch over a floor; some rungs fall off a cliff at large micro batches; the ladder is not monotone.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from autods.config.catalogue import describe_this_machine
from autods.config.deepspeed import start_settings
from autods.config.profiles import Budget, Profile, read_profile
from autods.config.rungs import Dimension, Rung, list_ladder, read_rungs, select_rungs
from autods.config.settings import Settings
from autods.forecast.predict.prices import read_constants
from autods.forecast.values import RungForecast, TierForecast
from autods.journal import Journal, TrialStore, trial_key
from autods.runner.testing import fit, out_of_memory
from autods.tuner.forecaster import NO_FORECASTER, Forecaster, StepForecast
from autods.tuner.trials import FitContext
from autods.types import Examined, Fit, ModelFacts, Outcome, Record, Steps, Trial, WorkloadSource
from tests.support.machines import a_machine

GIB = 2**30
RUNGS = {rung.name: rung for rung in select_rungs(list_ladder(read_rungs()), read_rungs())}
_LATER = "zero3-offload-optimizer"  # is drawn by itself, so that the others are as they were without it
_STEP_NOISE, _TRIAL_NOISE = 0.05, 0.01
_START_S = 4.0  # of a trial, until its first step
_FORECAST_ERROR = 0.03
_LOW = read_constants().low
_UNLIMITED = Budget()
_EXAMINED = Examined(
    batch_shape=(1, 1024), draws=16, evaluated=True, checkpoint_bytes=GIB, save_s=1.0, load_s=1.0, restored=True
)


@dataclass(frozen=True, slots=True)
class RungSurface:
    """One rung: bytes of a rank, seconds of a step."""

    state_bytes: float
    floor_bytes: float
    fixed_s: float
    sample_factor: float
    cliff_at: float
    cliff: float


@dataclass(slots=True)
class Surface:
    """One model on one machine, drawn by a seed. Answers trials and forecasts them; knows the truth.

    world_size: 0: drawn as well. quantised: kernels run in whole waves, so that step times rise by stairs.
    waves: share of the arithmetic → samples that a wave of its kernels holds; the rest is not quantised.
    """

    seed: int
    world_size: int = 0
    quantised: bool = False
    limit_bytes: int = 0
    sample_bytes: Mapping[bool, float] = field(default_factory=dict)  # with and without checkpointing
    sample_s: Mapping[bool, float] = field(default_factory=dict)
    rungs: Mapping[str, RungSurface] = field(default_factory=dict)
    tastes: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # key → (best place 0..1, loss far from it)
    waves: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        drawn = draw.choice((2, 4, 8, 16, 64))
        self.world_size = self.world_size or drawn
        self.limit_bytes = int(draw.choice((16, 24, 40, 80)) * GIB)
        states = self.limit_bytes * math.exp(draw.uniform(math.log(0.15), math.log(4.0)))  # of DDP, on one rank
        one = draw.uniform(0.01, 0.2)
        self.sample_s = {True: one, False: one * draw.uniform(0.74, 0.85)}
        with_ = self.limit_bytes * math.exp(draw.uniform(math.log(0.004), math.log(0.15)))
        self.sample_bytes = {True: with_, False: with_ * draw.uniform(2.0, 6.0)}
        own = random.Random(f"{self.seed} {_LATER}")
        self.rungs = {name: self._rung(name, own if name == _LATER else draw, states, one) for name in RUNGS}
        self.tastes = {}
        for rung in RUNGS.values():
            for key in rung.tune:
                self.tastes.setdefault(key, (draw.random(), draw.choice((0, 0, 0.01, 0.02))))
        if self.quantised:
            self.waves = _draw_waves(random.Random(f"{self.seed} waves"))

    def _rung(self, name: str, draw: random.Random, states: float, one: float) -> RungSurface:
        """Adam in half precision: 2 bytes of parameters, 2 (or 4) of gradients, 12 of the optimizer."""
        world, fixed = self.world_size, one * draw.uniform(0.3, 4.0)
        share = {"ddp": 1.0, "zero1": (4 + 12 / world) / 16, "zero2": (2 + 14 / world) / 16}
        share |= {"zero2-offload": 2 / 16 + 0.02, "zero3": 1 / world, "zero3-offload-param": 14 / 16 / world}
        share[_LATER] = 0.02 + 4 / 16 / world
        share |= {"zero3-offload": 0.02 + 2 / 16 / world, "zero3-nvme": 0.015 + 1 / 16 / world}
        slower = {"ddp": 1.0, "zero1": draw.uniform(0.85, 1.2), "zero2": draw.uniform(0.85, 1.3)}
        slower |= {"zero2-offload": draw.uniform(1.5, 8), "zero3": draw.uniform(1.0, 2.5)}
        slower |= {"zero3-offload-param": draw.uniform(1.3, 5), "zero3-offload": draw.uniform(1.5, 8)}
        slower |= {"zero3-nvme": draw.uniform(8, 60)}
        slower[_LATER] = draw.uniform(1.4, 6) if name == _LATER else math.inf
        cliff = draw.random() < 0.3
        return RungSurface(
            state_bytes=states * share[name] * draw.uniform(1.0, 1.15),
            floor_bytes=states * share[name] * draw.uniform(1.0, 1.4),
            fixed_s=fixed * slower[name],
            sample_factor=draw.uniform(0.97, 1.06),
            cliff_at=draw.uniform(4, 64) if cliff else math.inf,
            cliff=draw.uniform(1.1, 1.6),
        )

    def peak_bytes(self, trial: Trial) -> float:
        """Of the fullest rank."""
        rung, knobs = self.rungs[trial.rung], trial.knobs
        rising = rung.state_bytes + self.sample_bytes[knobs.checkpointing] * knobs.micro_batch
        return max(rung.floor_bytes, rising) + _bucket_bytes(knobs.settings)

    def step_s(self, trial: Trial) -> float:
        """Without noise."""
        knobs = trial.knobs
        micro_step_s = self._micro_step_s(trial.rung, knobs.checkpointing, knobs.micro_batch)
        return knobs.accumulation * micro_step_s * (1 + self.distaste(trial))

    def _micro_step_s(self, name: str, recomputes: bool, size: int) -> float:
        """With the best settings."""
        rung, samples = self.rungs[name], float(size)
        for share, wave in self.waves:
            samples += share * (wave * math.ceil(size / wave) - size)
        samples = min(samples, rung.cliff_at) + max(0.0, samples - rung.cliff_at) * rung.cliff
        return rung.fixed_s + samples * self.sample_s[recomputes] * rung.sample_factor

    def distaste(self, trial: Trial) -> float:
        """Share of time that its settings cost beside the best ones."""
        lost = 0.0
        tune = RUNGS[trial.rung].tune
        for key, row in tune.items():
            best, cost = self.tastes[key]
            lost += cost * min(1.0, abs(_place(row, trial.knobs.settings.get(key)) - best) * 2) ** 2
        return lost

    def rate(self, trial: Trial) -> float:
        """Samples a second of all ranks, without noise."""
        return trial.knobs.train_batch(self.world_size) / self.step_s(trial)

    def run(self, trial: Trial, *, id: int) -> Record:
        """As a runner answers."""
        outcome = self.answer(trial)
        steps_s = sum(outcome.step_s) + trial.steps.warmup * outcome.step_s[0] if isinstance(outcome, Fit) else 0.0
        return Record(id=id, trial=trial, outcome=outcome, seconds=_START_S + steps_s)

    def answer(self, trial: Trial) -> Outcome:
        peak = self.peak_bytes(trial)
        if trial.limited and peak > self.limit_bytes:
            wanted = min(peak - self.limit_bytes, self.sample_bytes[trial.knobs.checkpointing])
            return out_of_memory(missing_bytes=max(1, int(wanted)))
        noise = random.Random(f"{self.seed + 10_000} {trial_key(trial)}")  # of the trial alone: in any order the same
        times = _measured(self.step_s(trial) * math.exp(noise.gauss(0, _TRIAL_NOISE)), trial.steps, noise)
        middle = statistics.median(times)
        rate = trial.knobs.train_batch(self.world_size) / middle
        spread = _spread(times)
        shown = fit(peak_bytes=int(peak), samples_per_second=rate, step_s=middle, limit_bytes=self.limit_bytes)
        losses = tuple(8.0 - index / 10 for index in range(len(times)))
        examined = _EXAMINED if trial.exam == "worst_case" else None
        return replace(shown, spread=spread, step_s=times, losses=losses, examined=examined)

    def survey(self) -> tuple[ModelFacts, Mapping[str, str]]:
        facts = ModelFacts(
            parameters=10**9, largest_parameter=10**7, checkpointing=True, tokens_per_sample=None, has_optimizer=False
        )
        return facts, {}

    def final_config(self, trial: Trial) -> dict[str, Any]:
        return {}

    def optimum(self, usable_bytes: float, names: Iterable[str], most: int = 4096) -> tuple[float, str]:
        """The highest rate within the memory of any rung, micro batch and checkpointing, and what reaches it: at the
        speed of the best settings, in the memory that is left beside the buckets with which a rung starts."""
        best, what = 0.0, ""
        facts, _ = self.survey()
        for name, recomputes in itertools.product(names, (True, False)):
            rung, with_ = self.rungs[name], "with" if recomputes else "without"
            start = start_settings(RUNGS[name], base={}, device_bytes=self.limit_bytes, facts=facts)
            room = usable_bytes - _bucket_bytes(start)
            if rung.floor_bytes > room:
                continue
            largest = min(most, int((room - rung.state_bytes) / self.sample_bytes[recomputes]))
            if largest < 1:
                continue
            corners = {1, largest, min(largest, int(rung.cliff_at) if rung.cliff_at < most else largest)}
            for size in range(1, largest + 1) if self.waves else corners:
                rate = size * self.world_size / self._micro_step_s(name, recomputes, size)
                if rate > best:
                    best, what = rate, f"{name}, micro batch {size}, {with_} checkpointing"
        return best, what


def _draw_waves(draw: random.Random) -> tuple[tuple[float, float], ...]:
    """Waves of the matrix products of a transformer: 128 × 128 tiles on all multiprocessors of a card at once.

    A wave of products with an output as wide as the model holds multiprocessors × 128² / (width × sequence) samples:
    22 of 128 tokens on an H100 for BERT base, a quarter of one of 2,048 tokens for 7B. Outputs that are three and four
    times as wide hold a third and a fourth. Gradients of weights sum over the batch, and are not quantised.
    """
    wave = math.exp(draw.uniform(math.log(0.25), math.log(48)))
    return (13 / 36, wave), (3 / 36, wave / 3), (8 / 36, wave / 4)


def _bucket_bytes(settings: Mapping[str, Any]) -> float:
    return sum(2.0 * value for key, value in settings.items() if key.endswith("bucket_size"))


def _place(row: Dimension, value: Any) -> float:
    """Where a setting lies between the ends of its range, 0 to 1; a start in the middle where nothing is set."""
    if row.choices:
        return row.choices.index(value) / max(1, len(row.choices) - 1) if value in row.choices else 0.0
    if not isinstance(value, (int, float)) or value <= 0:
        return 0.5
    return (math.log10(value) - 2) / 8


def _measured(step_s: float, steps: Steps, noise: random.Random) -> tuple[float, ...]:
    """The steps of a trial, until their median is known well enough or the time for that is spent."""
    times: list[float] = []
    elapsed_s = steps.warmup * step_s
    while len(times) < steps.most_timed:
        times.append(step_s * math.exp(noise.gauss(0, _STEP_NOISE)))
        elapsed_s += times[-1]
        if len(times) >= steps.timed and (elapsed_s >= steps.budget_s or _spread(times) <= steps.spread):
            break
    return tuple(times)


def _spread(times: Sequence[float]) -> float:
    """As `rank.step_recorder.relative_error`."""
    if len(times) < 2:
        return 0.0
    return 1.25 * statistics.stdev(times) / math.sqrt(len(times)) / statistics.median(times)


class SurfaceForecaster(Forecaster):
    """Forecasts a surface's peaks, each rung's off by a few percent.

    time_error: the standard error of each rung's step time, as a logarithm; None: no time is forecast. The low end of
    its interval is as far below it as a real forecast's, but not below what peak rates allow, 40 to 70 % of the truth.
    What settings gain is not forecast.
    """

    def __init__(self, surface: Surface, time_error: float | None = None) -> None:
        self.surface, self.time_error = surface, time_error
        self.forecasts: dict[str, RungForecast] = {}
        draw = random.Random(surface.seed + 20_000)
        self._off = {name: 1 + draw.gauss(0, _FORECAST_ERROR) for name in surface.rungs}
        draw = random.Random(surface.seed + 30_000)
        self._time_off = {name: math.exp(draw.gauss(0, time_error or 0.0)) for name in surface.rungs}
        self._at_peak = {name: draw.uniform(0.4, 0.7) for name in surface.rungs}

    def prepare(self, trials: Iterable[Trial]) -> None:
        list(trials)

    def finish(self) -> None:
        pass

    def forecast(self, trial: Trial) -> RungForecast:
        peak = self.surface.peak_bytes(trial) * self._off[trial.rung]
        limit = self.surface.limit_bytes
        use = TierForecast(
            peak_bytes=int(peak), low_bytes=int(peak * 0.92), high_bytes=int(peak * 1.08), limit_bytes=limit
        )
        verdict = "cannot_fit" if use.low_bytes > limit else "fits" if use.high_bytes <= limit else "tight"
        said = RungForecast(
            rung=trial.rung, verdict=verdict, reason=f"needs {peak / GIB:.1f} GiB", micro_batch=trial.knobs.micro_batch,
            memory={"device": use},
        )  # fmt: skip
        self.forecasts.setdefault(trial.rung, said)
        return said

    def step_time(self, trial: Trial) -> StepForecast | None:
        if self.time_error is None:
            return None
        step_s = self.surface.step_s(trial)
        least_s = step_s * self._at_peak[trial.rung]
        seconds = max(least_s, step_s * self._time_off[trial.rung])
        # A rung on the host has a fixed part of its own, which says nothing of that of the same rung on the device.
        fixed_s = trial.knobs.accumulation * self.surface.rungs[trial.rung].fixed_s
        copied_s = seconds * fixed_s / step_s if "host" in RUNGS[trial.rung].places.values() else 0.0
        low_s = max(least_s, _LOW * seconds)
        return StepForecast(seconds=seconds, low_seconds=low_s, computed_seconds=0.0, copied_seconds=copied_s)

    def largest(self, trial: Trial, sizes: Sequence[int], usable_bytes: float) -> int | None:
        low, high = 0, len(sizes)
        while low < high:
            middle = (low + high) // 2
            sized = replace(trial, knobs=replace(trial.knobs, micro_batch=sizes[middle]))
            if self.surface.peak_bytes(sized) * self._off[trial.rung] <= usable_bytes:
                low = middle + 1
            else:
                high = middle
        return sizes[low - 1] if low else None


@contextmanager
def searching(
    surface: Surface,
    *,
    profile: str | Profile = "default",
    budget: Budget = _UNLIMITED,
    forecaster: Forecaster | None = None,
    ladder: Sequence[Rung] = (),
    blind: bool = False,
) -> Iterator[FitContext]:
    """The context of a whole search of that surface, as a fit runs it, in a folder of its own."""
    with TemporaryDirectory() as folder:
        out = Path(folder)
        chosen = read_profile(profile) if isinstance(profile, str) else profile
        hardware = a_machine(surface.world_size)
        settings = Settings(
            source=WorkloadSource(kind="file", path="/model.py", name="model", digest="0"), gpus=surface.world_size,
            device="cuda", device_bytes=surface.limit_bytes, device_bytes_asked=True, out=out, profile=chosen,
            ladder=tuple(ladder) or tuple(RUNGS.values()), hardware=hardware,
            machine=describe_this_machine(hardware.cards, hardware),
            # A surface has the rate and memory of one micro batch.
            base={"bf16": {"enabled": True}, "gradient_accumulation_steps": 1}, seed=surface.seed, budget=budget,
        )  # fmt: skip
        journal = Journal(out / "journal.jsonl")
        past = journal.open(fingerprint="surface")
        memory = TrialStore(journal, past, surface.run, lambda event: None)
        seer = NO_FORECASTER if blind else forecaster or SurfaceForecaster(surface)
        facts, op_problems = surface.survey()
        yield FitContext(
            settings=settings, facts=facts, op_problems=op_problems, memory=memory, forecaster=seer,
            study=out / "study.jsonl", final_config=surface.final_config,
        )  # fmt: skip
