"""What every step of the search shares: the fit's context, retries, lengths and scores."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from ..config.deepspeed import accumulation_for, check_micro_batch, count_replicas, micro_batches
from ..config.settings import SPARE_HOST, Settings
from ..devices import find_device
from ..errors import EnvironmentBroken, InputError
from ..events import Listener, Note, TrialForecasted
from ..forecast.values import RungForecast
from ..journal import JOURNAL, History, Journal, TrialStore
from ..types import (
    Action,
    Failed,
    Fit,
    Knobs,
    ModelFacts,
    OutOfMemory,
    Record,
    Run,
    Steps,
    TierUse,
    Trial,
    is_machines_fault,
)
from ..units import format_bytes
from .forecaster import Forecaster

# Running the trial again changes nothing: the user has to repair the workload, the config or the machine first.
PERMANENT_ACTIONS: tuple[Action, ...] = ("fix_code", "fix_config", "fix_environment")
# The number to maximise; above 0 for a fit.
Score = Callable[[Record], float]


def open_journal(settings: Settings, fingerprint: str, listen: Listener) -> tuple[Journal, History, Settings]:
    """Start the journal of a fit or a probe, or go on with it. Returns it, its history, and the settings to go on with.

    These have the device memory of the first run: buckets are sized by it, so with another size no finished trial would
    be asked for again. Raises InputError where the journal is another's, and where much less memory is free now.
    """
    journal = Journal(settings.out / JOURNAL)
    past = journal.open(fingerprint=fingerprint, device_bytes=settings.device_bytes, options=settings.options)
    spare = SPARE_HOST if find_device(settings.device).shares_host_memory else settings.profile.memory.headroom
    then, now = past.device_bytes, settings.device_bytes
    if now < (1 - spare) * then:
        raise InputError(
            f"it began with {format_bytes(then)} for a rank, and {format_bytes(now)} are free now",
            place=str(settings.out),
            hint="end the processes that hold the rest, or give --fresh to start over with what is free",
        )
    if past.records:
        text = f"resuming: {len(past.records)} finished trials are not run again"
        if then < (1 - spare) * now:
            text += (
                f"; a rank keeps {format_bytes(then)}, although {format_bytes(now)} are free now (--fresh takes them)"
            )
        listen(Note(text=text))
    return journal, past, replace(settings, device_bytes=then)


_EXAM = 2  # so many times as long as another trial one of the certificate may take


@dataclass(frozen=True, slots=True, kw_only=True)
class FitContext:
    """The inputs that all steps share.

    `settings` include the config that the workload brings.
    `op_problems` maps a DeepSpeed op to the reason that it cannot be built here.
    `study` is the file that shows Optuna's study to its readers.
    `final_config` returns a trial's DeepSpeed config as the user gets it.
    `save_best` gets the best config after each step, so that it is on disk should the fit be killed.
    `least_micro_batch` is the smallest that the model can be trained with, as far as is known. `own_batch` is that of a
    script whose command line cannot change it, where a trial has shown it.
    `elapsed_s` returns the seconds that the fit has taken; None: those of its trials count.
    """

    settings: Settings
    facts: ModelFacts
    memory: TrialStore
    forecaster: Forecaster
    study: Path
    final_config: Callable[[Trial], Mapping[str, Any]]
    op_problems: Mapping[str, str] = field(default_factory=dict)
    save_best: Callable[[Record], None] = lambda record: None
    least_micro_batch: int = 1
    own_batch: int | None = None
    elapsed_s: Callable[[], float] | None = None

    @property
    def usable_bytes(self) -> float:
        """Device memory less the headroom of the profile."""
        return self.settings.usable_bytes

    @property
    def world_size(self) -> int:
        """Replicas of the model; each has a separate batch."""
        return count_replicas(self.settings.base, self.settings.gpus, self.facts)

    @property
    def score(self) -> Score:
        """The score to maximise. Samples and tokens have the same order: a sample has the same tokens everywhere."""
        return memory_score if self.settings.objective == "memory" else samples_per_second

    @property
    def fixed_batch(self) -> int | None:
        """A script's own micro batch, as a trial or a simulation has shown it."""
        return self.own_batch or self.forecaster.own_batch

    @property
    def sizes(self) -> Sequence[int]:
        """The micro batches that may be tried, ascending; the smallest alone where memory is the objective.

        Raises InputError where a script's own one does not divide the global batch.
        """
        if (fixed := self.fixed_batch) is not None:
            check_micro_batch(fixed, self.world_size, self.settings.global_batch, is_fixed=True)
            return (fixed,)
        sizes = micro_batches(self.settings.global_batch, self.world_size, self.settings.profile.grow.most_micro_batch)
        sizes = sizes[bisect_left(sizes, self.least_micro_batch) :]
        return sizes[:1] if self.settings.objective == "memory" else sizes

    def resize(self, knobs: Knobs, micro_batch: int) -> Knobs:
        """The knobs with this micro batch, at the fit's global batch."""
        settings = self.settings
        accumulation = accumulation_for(
            settings.global_batch, micro_batch, self.world_size, settings.default_accumulation
        )
        return replace(knobs, micro_batch=micro_batch, accumulation=accumulation)

    @property
    def noise(self) -> float:
        """The relative error of a short timing: the profile's, or the difference of repeated timings if that is larger.

        Repeats differ by more than the profile expects where other work slows down this machine.
        """
        return max(self.settings.profile.race.noise, repeat_difference(self.memory.records))

    def run(self, trial: Trial) -> Record:
        """Run a trial as `try_trial` does; raises when the machine fails."""
        return self.check(self.try_trial(trial))

    def try_trial(self, trial: Trial) -> Record:
        """Run a trial. Where it may leave the headroom free with another limit of its allocator, run it again so.

        An allocator that ran full runs without the headroom: what then fits has proven that it leaves it free, and its
        steps have the time of the flushes in them. One that lacked memory so, at the smallest micro batch, gets it.
        """
        kept = trial.without_headroom()
        if trial.limited and any(_fits_as(kept, record) for record in self.memory.records):
            return self.memory.run(kept)
        record = self.memory.run(trial)
        if record.trial.knobs.keeps_headroom:
            is_smallest = trial.knobs.micro_batch == self.sizes[0]
            is_foreseen = not trial.knobs.keeps_headroom  # the forecast chose it, which has learned now
            lacks = isinstance(record.outcome, OutOfMemory) and record.outcome.tier == "device"
            return self.memory.run(trial) if lacks and is_smallest and is_foreseen and self.may_run(1) else record
        if not (trial.limited and self._may_keep_headroom(record) and self.may_run(1)):
            return record
        again = self.memory.run(kept)
        return again if isinstance(again.outcome, Fit) else record

    def _may_keep_headroom(self, record: Record) -> bool:
        """Whether the trial used the headroom, on a card where its tensors alone may leave it free."""
        fit = record.outcome
        if not isinstance(fit, Fit) or self.fits(record):
            return False
        if fit.card is None:
            return fit.alloc_retries > 0
        beside_bytes = fit.memory["device"].peak_bytes - fit.card.reserved_bytes
        return fit.card.allocated_bytes + beside_bytes <= self.usable_bytes

    def check(self, record: Record) -> Record:
        """Return the record. Raise where the machine failed (a full disk, a lost GPU): further trials would fail alike.

        A broken op fails only the rungs that need it. The journal does not keep such a trial; the next run repeats it.
        """
        outcome = record.outcome
        has_broken_op = isinstance(outcome, Failed) and outcome.op is not None
        if isinstance(outcome, Fit) or has_broken_op or not is_machines_fault(outcome):
            return record
        place = f"{record.trial.rung}, rank {outcome.rank}, {outcome.phase}; log: {self.log_path(record)}"
        raise EnvironmentBroken(f"{outcome.evidence}\n  {outcome.advice} ({place})")

    def log_path(self, record: Record) -> Path:
        """Return the log of the rank that failed."""
        assert not isinstance(record.outcome, Fit)
        folder = self.settings.out / "logs" / f"{record.id:03d}-{record.trial.rung}"
        return folder / f"rank{max(0, record.outcome.rank)}.log"

    def forecast(self, trial: Trial) -> RungForecast | None:
        """The memory that the trial will need, which listeners are told; None when it cannot be simulated."""
        forecast = self.forecaster.forecast(trial)
        if forecast is not None:
            memory = {
                tier: TierUse(peak_bytes=need.peak_bytes, limit_bytes=need.limit_bytes)
                for tier, need in forecast.memory.items()
            }
            simulated = replace(trial, knobs=replace(trial.knobs, micro_batch=forecast.micro_batch))
            self.memory.listen(TrialForecasted(trial=simulated, memory=memory))
        return forecast

    def fits(self, record: Record) -> bool:
        """Whether the trial fitted well and left the headroom free on the device."""
        return fits_within(record, self.usable_bytes)

    @property
    def left_s(self) -> float:
        """The seconds that the budget has left; infinite without one."""
        records = self.memory.records
        elapsed_s = sum(record.seconds for record in records) if self.elapsed_s is None else self.elapsed_s()
        return (self.settings.budget.seconds or math.inf) - elapsed_s

    @property
    def start_s(self) -> float:
        """The seconds that a trial takes besides its steps: those of the longest start so far."""
        fitted = [(record.seconds, record.outcome) for record in self.memory.records]
        return max((seconds - sum(fit.step_s) for seconds, fit in fitted if isinstance(fit, Fit)), default=0.0)

    def may_run(self, trials: int, steps: Steps | None = None) -> bool:
        """Whether the budget allows growth, race and tuning so many more trials, besides those of the certificate.

        Each may take as long as the longest that fitted, and as long as these `steps`. Those of the certificate take
        longer, because they save a checkpoint or run the reference.
        """
        budget, records = self.settings.budget, self.memory.records
        certify = self.settings.profile.certify
        reserved = 0 if certify.most_trials < 1 else 1 if certify.parity is None else 3
        if budget.trials and len(records) + trials + reserved > budget.trials:
            return False
        longest_s = max((record.seconds for record in records if isinstance(record.outcome, Fit)), default=0.0)
        trial_s = max(longest_s, 0.0 if steps is None else self.start_s + steps.budget_s)
        return trials * trial_s + reserved * _EXAM * longest_s <= self.left_s


def _fits_as(trial: Trial, record: Record) -> bool:
    """Whether the record is a fit of the trial's config, by whatever segments."""
    knobs = replace(record.trial.knobs, expandable=trial.knobs.expandable)
    return isinstance(record.outcome, Fit) and (record.trial.rung, knobs) == (trial.rung, trial.knobs)


def run_with_retry(trial: Trial, run: Run) -> tuple[Record, ...]:
    """Run a trial, and run it once more after a failure that may be accidental. The last record counts."""
    first = run(trial)
    match first.outcome:
        case Failed(failure="toolchain") | Fit() | OutOfMemory():
            return (first,)
        case Failed(action=action) if action in PERMANENT_ACTIONS:
            return (first,)
        case Failed():
            return (first, run(replace(trial, repeat=trial.repeat + 1)))


def fit_steps_to_budget(steps: Steps, step_s: float, *, least: int = 1) -> Steps:
    """The steps of a trial, shortened to its time budget where a step takes `step_s` seconds; 0: unknown.

    At least `least` steps are timed. Few of them are enough where steps are long, because their noise is small.
    """
    affordable = steps.budget_s / step_s if step_s > 0 else math.inf
    if affordable >= steps.warmup + steps.timed:
        return steps
    warmup = min(steps.warmup, 1)
    timed = min(steps.timed, max(least, int(affordable) - warmup))
    is_fixed = steps.timed == steps.most_timed
    return replace(steps, warmup=warmup, timed=timed, most_timed=timed if is_fixed else steps.most_timed)


def fits_within(record: Record, usable_bytes: float) -> bool:
    """Whether the trial fitted and left the headroom free on the device."""
    return isinstance(record.outcome, Fit) and record.outcome.leaves_headroom(usable_bytes, record.trial.knobs)


def fits_well(record: Record) -> bool:
    """Whether the trial fitted, whatever its peak is, and its allocator never ran full with the headroom in use."""
    return fits_within(record, math.inf)


def samples_per_second(record: Record) -> float:
    """Throughput; 0 for a trial that did not fit."""
    return record.outcome.samples_per_second if isinstance(record.outcome, Fit) else 0.0


def memory_score(record: Record) -> float:
    """A score that is higher for a lower device peak; 0 for a trial that did not fit."""
    return 1 / max(1, record.outcome.device_peak_bytes) if isinstance(record.outcome, Fit) else 0.0


def median_step_s(record: Record) -> float:
    """Seconds of the trial's median optimizer step; 0 for a trial that did not fit."""
    fit = record.outcome
    return median(fit.step_s) if isinstance(fit, Fit) and fit.step_s else 0.0


def repeat_difference(records: Iterable[Record]) -> float:
    """The largest share by which a timing lies below another one of the same config; 0 where none was repeated.

    The single step of a walk does not count as a timing.
    """
    rates: dict[object, list[float]] = {}
    for record in records:
        trial, knobs = record.trial, record.trial.knobs
        if isinstance(record.outcome, Fit) and trial.purpose != "walk" and trial.exam is None:
            batch = (knobs.micro_batch, knobs.accumulation, knobs.checkpointing, knobs.expandable, knobs.keeps_headroom)
            config = (trial.rung, *batch, *sorted(knobs.settings.items()), *sorted(trial.conditions.items()))
            rates.setdefault(config, []).append(samples_per_second(record))
    return max((1 - min(repeats) / max(repeats) for repeats in rates.values()), default=0.0)
