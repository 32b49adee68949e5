"""A fit without cards: the whole search, whose trials the simulated GPU answers. Nothing that it finds is proven."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from ..config.catalogue import Machine
from ..config.deepspeed import compose
from ..config.settings import Settings, apply_survey
from ..diagnosis.trial_outcome import wants_larger_batch
from ..errors import InputError
from ..events import Listener, Note
from ..forecast.allocator import read_alloc_conf
from ..forecast.forecaster import Forecaster as ForecastService
from ..forecast.forecaster import Limits, TrialForecaster
from ..forecast.simulator.client import SimulationFailed
from ..forecast.step_time import forecast_speed
from ..forecast.values import EngineSpec, RungForecast, StartSimulator
from ..journal import TrialStore, trial_key
from ..report.results import Report
from ..types import Failed, Fit, ModelFacts, Outcome, OutOfMemory, Record, Tier, TierUse, Timing, Trial
from .candidates import why_not_forecast
from .fit import fit
from .forecasts import Forecaster, engine_spec, shorten_accumulation, start_processes

# Of a real trial, before its first step. Estimates: CUDA contexts and NCCL's communicators of a node, and random
# weights, which each rank draws in host memory.
_START_S = 8.0
_BUILT_PARAMETERS_PER_S = 3e8
_LIMITED: tuple[Tier, ...] = ("device", "host", "nvme")


def rehearse(settings: Settings, *, listen: Listener, start: StartSimulator | None = None) -> Report:
    """Search as `fit` does, on the simulated GPUs of `settings.rehearsed_on`, and write the report to `settings.out`.

    A rehearsal that was killed goes on where it stopped. `start` replaces the simulator. Raises InputError for a
    workload that cannot be simulated, EnvironmentBroken when the machine lacks something, and Interrupted on Ctrl-C.
    """
    machine = settings.rehearsed_on
    assert machine is not None
    listen(Note(text=f"a rehearsal on {machine.title}: simulated GPUs answer each trial, and nothing is proven"))
    allocator = read_alloc_conf(os.environ)
    with (start or start_processes(settings, listen))(settings.source) as simulator:
        service = ForecastService(simulator, allocator.expandable)
        runner = RehearsalRunner(settings, machine, service, lambda: simulator.facts("cuda", ranks=settings.gpus))

        @contextmanager
        def open_forecaster(
            settings: Settings, config_of: Callable[[Trial], dict[str, Any]], memory: TrialStore, listen: Listener
        ) -> Iterator[Forecaster]:
            forecaster = TrialForecaster(
                forecaster=service,
                spec_of=runner.spec_of,
                key_of=trial_key,
                limits=runner.limits,
                report=lambda text: listen(Note(text=text, passing=True)),
                machine=machine,
            )
            try:
                yield forecaster
            finally:
                forecaster.close()

        return fit(settings, listen=listen, start=lambda *_: nullcontext(runner), forecaster=open_forecaster)


class RehearsalRunner:
    """Answers trials by exact simulations of their configs; a `tuner.fit.Runner`.

    A trial fits when the middle of its forecast is within the limits of every tier. Its seconds are an estimate of what
    it would take on real ranks. `read_facts` returns the facts of the model.
    """

    def __init__(
        self, settings: Settings, machine: Machine, service: ForecastService, read_facts: Callable[[], ModelFacts]
    ) -> None:
        self.settings, self.machine, self.service = settings, machine, service
        self.limits = Limits(
            device_bytes=settings.device_bytes, host_bytes=machine.host_bytes, nvme_bytes=machine.nvme_bytes
        )
        self._read_facts = read_facts
        self._facts: ModelFacts | None = None

    @property
    def facts(self) -> ModelFacts:
        """The facts of the model; `survey` reads them."""
        assert self._facts is not None, "survey first"
        return self._facts

    def survey(self) -> tuple[ModelFacts, Mapping[str, str]]:
        """The facts of the model, and the ops whose speed on the machine is not known."""
        try:
            self._facts = self._read_facts()
        except SimulationFailed as failed:
            raise _refuse(failed) from None
        if (reason := why_not_forecast(self._facts)) is not None:
            raise InputError(f"cannot be rehearsed: {reason}", place=self.settings.source.path)
        self.settings = apply_survey(self.settings, self._facts)
        unknown = {
            "cpu_adam": (self.machine.dram_gb_per_s, "host memory"),
            "async_io": (self.machine.nvme_gb_per_s, "NVMe"),
        }
        return self._facts, {
            op: f"the catalogue has no bandwidth of {tier} for {self.machine.name}"
            for op, (rate, tier) in unknown.items()
            if rate is None
        }

    def run(self, trial: Trial, *, id: int) -> Record:
        """Answer the trial. Raises InputError for a config that cannot be simulated."""
        try:
            outcome = self._answer(trial)
        except SimulationFailed as failed:
            if not wants_larger_batch(str(failed)):
                raise _refuse(failed) from None
            evidence = " ".join(str(failed.problem).split())
            outcome = Failed(
                failure="user_code", rank=0, phase="forward", evidence=evidence, action="fix_code",
                advice="train with larger micro batches", wants_larger_batch=True,
            )  # fmt: skip
        steps_s = (
            sum(outcome.step_s) * (1 + trial.steps.warmup / len(outcome.step_s)) if isinstance(outcome, Fit) else 0.0
        )
        build_s = _START_S + self.facts.parameters / _BUILT_PARAMETERS_PER_S
        return Record(id=id, trial=trial, outcome=outcome, seconds=build_s + steps_s)

    def final_config(self, trial: Trial) -> dict[str, Any]:
        """The DeepSpeed config of a trial as the user gets it."""
        return compose(
            self.settings.rung(trial.rung),
            trial.knobs,
            base=self.settings.base,
            world_size=self.facts.replicas(self.settings.gpus),
            own_optimizer=self.facts.has_optimizer,
            nvme_path=self.settings.nvme_path,
        )

    def spec_of(self, trial: Trial) -> EngineSpec:
        """The engine to simulate for a trial."""
        short = shorten_accumulation(trial)
        links = self.machine.links
        return replace(
            engine_spec(self.settings, short, self.final_config(short)),
            nvlink=None if links is None else links.nvlink_gb_per_s is not None,
        )

    def _answer(self, trial: Trial) -> Outcome:
        spec, knobs = self.spec_of(trial), trial.knobs
        simulation = self.service.simulate(spec, knobs.micro_batch)
        forecast = self.service.judge(spec, simulation, self.limits, advise=False)
        if trial.limited and (full := _find_full_tier(forecast)) is not None:
            return full
        ranks_per_node = min(spec.ranks_per_node, spec.world_size)
        assert simulation.schedule is not None, "a simulated GPU logs its work"
        speed = forecast_speed(
            simulation.schedule,
            self.machine,
            world_size=self.facts.replicas(self.settings.gpus),
            ranks_per_node=ranks_per_node,
            micro_batch=knobs.micro_batch,
            micro_batches=int(spec.ds_config.get("gradient_accumulation_steps") or 1),
            accumulation=knobs.accumulation,
            tokens_per_sample=self.facts.tokens_per_sample,
        )
        if speed is None:
            problem = f"{trial.rung} cannot be rehearsed: {self.machine.name} lacks a rate that its step needs"
            raise InputError(problem, place=self.machine.source, hint="leave the rung out with --ladder")
        memory = {
            tier: TierUse(peak_bytes=use.peak_bytes, limit_bytes=use.limit_bytes)
            for tier, use in forecast.memory.items()
        }
        step_s = (speed.step.seconds,) * trial.steps.timed
        return Fit(
            memory=memory,
            samples_per_second=speed.samples_per_second,
            tokens_per_second=speed.tokens_per_second,
            step_s=step_s,
            spread=0.0,
            losses=(),
            timing=Timing(wall_s=sum(step_s), steps_s=sum(step_s)),
        )


def _find_full_tier(forecast: RungForecast) -> OutOfMemory | None:
    """The out-of-memory of the first tier whose forecast exceeds its limit."""
    for tier in _LIMITED:
        use = forecast.memory.get(tier)
        if use is not None and use.limit_bytes is not None and use.peak_bytes > use.limit_bytes:
            return OutOfMemory(
                tier=tier,
                rank=0,
                phase=forecast.decides or "step",
                evidence=f"simulated: {forecast.reason}",
                wanted_bytes=use.peak_bytes - use.limit_bytes,
                free_bytes=0,
                limit_bytes=use.limit_bytes,
            )
    return None


def _refuse(failed: SimulationFailed) -> InputError:
    problem = " ".join(str(failed.problem).split())
    return InputError(f"cannot be rehearsed: {problem}", place=failed.place, hint=failed.hint)
