"""A fit without cards: the whole search, whose trials the simulated GPU answers. Nothing that it finds is proven."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

from ..config.deepspeed import compose, count_replicas
from ..config.settings import Settings, apply_survey
from ..diagnosis.trial_outcome import wants_larger_batch
from ..errors import InputError
from ..events import Listener, Note
from ..forecast.predict.replay import Replay
from ..forecast.predict.verdict import forecast_speed, replay_at_limit
from ..forecast.simulate.protocol import SimulationFailed
from ..forecast.simulation_cache import SimulationCache, read_alloc_conf, why_not_forecast
from ..forecast.values import RungForecast, StartSimulator
from ..journal import TrialStore
from ..report.results.fit import FitReport
from ..runner.rank_fork import may_share
from ..runner.time_limits import warm_up
from ..types import Failed, Fit, ModelFacts, Outcome, OutOfMemory, Record, Tier, TierUse, Timing, Trial
from ..units import format_bytes
from .certify import EXAM_STEPS, find_reference, make_exam, make_parity_steps, runs_losses_first, time_compared_steps
from .fit import fit
from .fit_report import FitResult, NothingFits
from .forecaster import Forecaster
from .loss_parity import is_same_maths
from .trial_forecasts import TrialForecaster, make_limited_engine, start_processes
from .trials import FitContext, median_step_s

# Estimates of what a real trial takes besides its steps: CUDA contexts and NCCL's communicators of a node, random
# weights, drawn in host memory once or by each rank, and a checkpoint, written to a disk of the node and read from it.
_START_S = 8.0
_BUILT_PARAMETERS_PER_S = 3e8
_PARTITIONED_PARAMETERS_PER_S = 3e9  # drawn on each card, sent from the first rank, and gathered to be set
_HALF_BYTES, _STATE_BYTES = 2, 12  # of a parameter: its half, and Adam's weight and moments in fp32
# A rank's torch.save and torch.load into and out of the page cache, on two cores of a virtual machine: 0.4 to 1.1 GB/s
# and 1.3 to 1.7 GB/s. What is more than a tenth of a node's memory (vm.dirty_background_ratio) waits for its disk.
_SAVED_BYTES_PER_S, _LOADED_BYTES_PER_S, _DISK_BYTES_PER_S = 5e8, 1.2e9, 1e9
_CACHED_SHARE = 0.1
_GATHERED_BYTES_PER_S = 4e9  # copied to the host and serialized by rank 0, for no file: torch.save to /dev/null there
_LIMITED: tuple[Tier, ...] = ("device", "host", "nvme")


def rehearse(settings: Settings, *, listen: Listener, start: StartSimulator | None = None) -> FitReport:
    """Search as `fit` does, on the simulated GPUs of `settings.machine`, and write the report to `settings.out`.

    A rehearsal that was killed goes on where it stopped. `start` replaces the simulator. Raises InputError for a
    workload that cannot be simulated, EnvironmentBroken when the machine lacks something, and Interrupted on Ctrl-C.
    """
    machine = settings.machine
    listen(Note(text=f"a rehearsal on {machine.title}: simulated GPUs answer each trial, and nothing is proven"))
    allocator = read_alloc_conf(os.environ, settings.device)
    with (start or start_processes(settings, listen))(settings.source) as simulator:
        cache = SimulationCache(simulator, allocator.expandable)
        runner = RehearsalRunner(settings, cache, lambda: simulator.facts("cuda", ranks=settings.gpus, machine=machine))

        def make_forecaster(
            settings: Settings, facts: ModelFacts, memory: TrialStore, listen: Listener
        ) -> AbstractContextManager[Forecaster]:
            return nullcontext(
                TrialForecaster(
                    cache=cache,
                    settings=settings,
                    facts=facts,
                    report=lambda text: listen(Note(text=text, passing=True)),
                )
            )

        return fit(
            settings,
            listen=listen,
            start=lambda *_: nullcontext(runner),
            forecaster=make_forecaster,
            estimate_real_s=runner.estimate_fit_s,
        )


class RehearsalRunner:
    """Answers trials by exact simulations of their configs; a `tuner.fit.Runner`.

    On the device a trial fits when its allocations, replayed at the card's limit, find memory. If they do by giving
    cached memory back in every step, it has the retries that a real trial would show. On the other tiers the middle of
    the forecast has to be within the limit. A trial's seconds are an estimate of what it would take on real ranks.
    `read_facts` returns the facts of the model.
    """

    def __init__(self, settings: Settings, cache: SimulationCache, read_facts: Callable[[], ModelFacts]) -> None:
        self.settings, self.machine, self.cache = settings, settings.machine, cache
        self._read_facts = read_facts
        self._facts: ModelFacts | None = None
        self._has_built = False  # a model that later trials share

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
            op: f"{op} has no time: the catalogue has no bandwidth of {tier} for {self.machine.name}"
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
        seconds = _START_S
        if not (self._shares_model(trial) and self._has_built):
            seconds += self._time_build(trial)
            self._has_built = True
        if isinstance(outcome, Fit):
            seconds += self._count_steps(trial, median(outcome.step_s)) * median(outcome.step_s)
        return Record(id=id, trial=trial, outcome=outcome, seconds=seconds)

    def estimate_fit_s(self, result: FitResult | NothingFits, context: FitContext) -> float:
        """Return the seconds that the trials would take on real ranks, with a certificate that passes at once.

        Losses are compared where the budget has the time.
        """
        seconds = sum(record.seconds for record in context.memory.records)
        limits = self.settings.profile.certify
        if isinstance(result, NothingFits) or limits.most_trials < 1:
            return seconds
        best, first = result.best.trial, result.walked.winner
        assert first is not None, "a config fits"
        longest_s = median_step_s(result.best) * self.facts.longest_ratio
        steps = make_exam(best, context, longest_s).steps
        seconds += _START_S + self._time_build(best) + (steps.warmup + steps.timed + EXAM_STEPS) * longest_s
        seconds += self._time_checkpoint(best)
        plain = find_reference(best, first, context)
        if limits.parity is None or plain is None or is_same_maths(best, plain):
            return seconds
        steps = make_parity_steps(result.best, limits.parity)
        builds = 2 if not self._shares_model(best) else 0 if runs_losses_first(context) else 1
        compared_s = (steps.warmup + steps.timed) * sum(time_compared_steps(result.best, plain, context))
        compared_s += 2 * _START_S + builds * self._time_build(best)
        budget_s = self.settings.budget.seconds or math.inf
        return seconds + compared_s if seconds + compared_s <= budget_s else seconds

    def _time_checkpoint(self, trial: Trial) -> float:
        """The seconds in which the ranks save a checkpoint and load it, as long as the one that moves most.

        Rank 0 saves what ranks have alike, and all of them load it. At stage 3 it gathers the whole weights, too.
        """
        stage, ranks, nodes = self.settings.rung(trial.rung).stage, self.settings.gpus, self.settings.nodes
        states = _STATE_BYTES / (ranks if stage else 1)
        loaded = states + _HALF_BYTES / (ranks if stage == 3 else 1)
        gathered_s = self.facts.parameters * (_HALF_BYTES if stage == 3 else 0) / _GATHERED_BYTES_PER_S
        written = _HALF_BYTES + (_STATE_BYTES / nodes if stage else _STATE_BYTES)
        beyond = max(0.0, written * self.facts.parameters - _CACHED_SHARE * (self.machine.host_bytes or 0))
        rank_s = self.facts.parameters * loaded * (1 / _SAVED_BYTES_PER_S + 1 / _LOADED_BYTES_PER_S)
        return rank_s + gathered_s + 2 * beyond / _DISK_BYTES_PER_S

    def _time_build(self, trial: Trial) -> float:
        """The seconds in which ranks build the model: whole in host memory, or partitioned as it is made."""
        is_partitioned = self.settings.source.zero_init and self.settings.rung(trial.rung).stage == 3
        return self.facts.parameters / (_PARTITIONED_PARAMETERS_PER_S if is_partitioned else _BUILT_PARAMETERS_PER_S)

    def _shares_model(self, trial: Trial) -> bool:
        """Whether the ranks of a real trial get a model that an earlier trial has built; see `rank_fork.may_share`."""
        has_parts = self.facts.experts or self.facts.pipeline_stages
        return not has_parts and may_share(self.settings.source, trial.exam, self.final_config(trial))

    def _count_steps(self, trial: Trial, step_s: float) -> int:
        """How many optimizer steps a real trial runs. One that measures ends with a step that times collectives."""
        steps = warm_up(trial, self.final_config(trial))
        run = steps.warmup + steps.timed
        times_collectives = steps.most_timed > 1 and self.settings.gpus > 1 and (run + 2) * step_s <= steps.budget_s
        return run + times_collectives

    def final_config(self, trial: Trial) -> dict[str, Any]:
        """The DeepSpeed config of a trial as the user gets it."""
        return compose(self.settings.rung(trial.rung), trial.knobs, self.settings.site, self.facts)

    def _answer(self, trial: Trial) -> Outcome:
        spec, knobs = make_limited_engine(self.settings, self.facts, trial), trial.knobs
        simulation = self.cache.simulate(spec, knobs.micro_batch)
        forecast = self.cache.judge(spec, simulation, advise=False, chooses=False)
        replayed = replay_at_limit(spec, simulation, forecast) if trial.limited else None
        if trial.limited and (full := _find_full_tier(forecast, replayed)) is not None:
            return full
        assert simulation.schedule is not None, "a simulated GPU logs its work"
        speed = forecast_speed(
            spec,
            simulation,
            accumulation=knobs.accumulation,
            tokens_per_sample=self.facts.tokens_per_sample,
            replicas=count_replicas(self.settings.base, self.settings.gpus, self.facts),
            returned=0 if replayed is None else replayed.late_returned,
        )
        if speed is None:
            problem = f"{trial.rung} cannot be rehearsed: {self.machine.name} lacks a rate that its step needs"
            raise InputError(problem, place=self.machine.source, hint="leave the rung out with --ladder")
        memory = {
            tier: TierUse(
                peak_bytes=min(use.peak_bytes, use.limit_bytes or use.peak_bytes) if trial.limited else use.peak_bytes,
                limit_bytes=use.limit_bytes,
            )
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
            alloc_retries=0 if replayed is None else replayed.late_retries * trial.steps.timed,
            timing=Timing(wall_s=sum(step_s), steps_s=sum(step_s)),
        )


def _find_full_tier(forecast: RungForecast, replayed: Replay | None) -> OutOfMemory | None:
    """The out-of-memory of the first tier that lacks memory.

    On the device the replay at its limit decides, if there is one, and on other tiers the middle of the forecast.
    """
    limits = {tier: use.limit_bytes for tier, use in forecast.memory.items() if use.limit_bytes is not None}
    judged = _LIMITED if replayed is None else _LIMITED[1:]
    full = [tier for tier in judged if tier in limits and forecast.memory[tier].peak_bytes > limits[tier]]
    ran_out = None if replayed is None else replayed.ran_out
    phase, evidence = forecast.decides or "step", f"simulated: {forecast.reason}"
    if ran_out is not None:
        full, phase = ["device"], ran_out.phase
        evidence += f"; torch's allocator finds no {format_bytes(ran_out.wanted_bytes)} in one piece"
    if not full:
        return None
    tier = full[0]
    use, limit_bytes = forecast.memory[tier], limits[tier]
    return OutOfMemory(
        tier=tier,
        rank=0,
        phase=phase,
        evidence=evidence,
        # What is missing is told by the least limit that is enough, not by the request that failed.
        wanted_bytes=max(1, use.peak_bytes - limit_bytes),
        free_bytes=0,
        limit_bytes=limit_bytes,
        fragmented=ran_out is not None and use.low_bytes <= limit_bytes,
    )


def _refuse(failed: SimulationFailed) -> InputError:
    problem = " ".join(str(failed.problem).split())
    return InputError(f"cannot be rehearsed: {problem}", place=failed.place, hint=failed.hint)
