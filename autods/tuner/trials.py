"""What every step of the search shares: the batch identity, retries, the length of a trial, and its score."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import median

from ..types import Action, Failed, Fit, OutOfMemory, Record, Run, Steps, Trial

# Running the trial again changes nothing: the user has to repair the workload, the config or the machine first.
PERMANENT_ACTIONS: tuple[Action, ...] = ("fix_code", "fix_config", "fix_environment")


def accumulation_for(global_batch: int | None, micro_batch: int, world_size: int) -> int:
    """Micro batches per optimizer step, so that micro batch × accumulation × world size = global batch; 1 without one.

    Raises ValueError when no whole number does it: callers take micro batches from `micro_batches` only.
    """
    if global_batch is None:
        return 1
    accumulation, rest = divmod(global_batch, micro_batch * world_size)
    if rest or not accumulation:
        raise ValueError(f"a global batch of {global_batch} is no multiple of {micro_batch} × {world_size} ranks")
    return accumulation


def micro_batches(global_batch: int | None, world_size: int, most: int) -> range | tuple[int, ...]:
    """The micro batches that may be tried, ascending: all up to `most`, or those that divide a rank's global batch."""
    if global_batch is None:
        return range(1, most + 1)
    share = global_batch // world_size
    return tuple(size for size in range(1, min(share, most) + 1) if share % size == 0)


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


def fits_well(record: Record) -> bool:
    """Whether the trial fitted, and its allocator never had to flush its cache: later steps would suffer from that."""
    return isinstance(record.outcome, Fit) and record.outcome.alloc_retries == 0


def fits_within(record: Record, usable_bytes: float) -> bool:
    """Whether the trial fitted well and left the headroom free on the device."""
    return fits_well(record) and isinstance(record.outcome, Fit) and record.outcome.device_peak_bytes <= usable_bytes


def samples_per_second(record: Record) -> float:
    """Throughput; 0 for a trial that did not fit."""
    return record.outcome.samples_per_second if isinstance(record.outcome, Fit) else 0.0


def memory_score(record: Record) -> float:
    """A score that is higher for a lower device peak; 0 for a trial that did not fit."""
    return 1 / max(1, record.outcome.device_peak_bytes) if isinstance(record.outcome, Fit) else 0.0


def score_function(objective: str) -> Callable[[Record], float]:
    """The score to maximise. Samples and tokens have the same order, since a sample has the same tokens everywhere."""
    return memory_score if objective == "memory" else samples_per_second


def median_step_s(record: Record) -> float:
    """Seconds of the trial's median optimizer step; 0 for a trial that did not fit."""
    fit = record.outcome
    return median(fit.step_s) if isinstance(fit, Fit) and fit.step_s else 0.0


def is_same_config(first: Record, second: Record) -> bool:
    """Whether two trials ran the same rung and knobs, whatever their purpose."""
    return (first.trial.rung, first.trial.knobs) == (second.trial.rung, second.trial.knobs)
