"""What every step of the search shares: asking once more after a fluke, and the batch identity."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import median

from ..types import Action, Failed, Fit, OutOfMemory, Record, Run, Steps, Trial

# Nothing of these changes by asking again: the workload, the config or the machine has to be mended first.
PERMANENT_ACTIONS: tuple[Action, ...] = ("fix_code", "fix_config", "fix_environment")


def accumulation_for(global_batch: int | None, micro_batch: int, world_size: int) -> int:
    """Micro batches per optimizer step, so that micro batch × accumulation × world size = global batch; 1 without one.

    Raises ValueError when no whole number does it: callers offer only micro batches from `micro_batches`.
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
    """The records of one question, the last one is the answer: a failure that may be a fluke is asked once more."""
    first = run(trial)
    match first.outcome:
        case Failed(failure="toolchain") | Fit() | OutOfMemory():
            return (first,)
        case Failed(action=action) if action in PERMANENT_ACTIONS:
            return (first,)
        case Failed():
            return (first, run(replace(trial, repeat=trial.repeat + 1)))


def fit_steps_to_budget(steps: Steps, step_s: float, *, least: int = 1) -> Steps:
    """Of warm-up and timed steps as many as their budget has room for, of the timed ones at least so many: the noise of
    a long step is small. step_s: how long one is expected to take, 0: unknown."""
    room = steps.budget_s / step_s if step_s > 0 else math.inf
    if room >= steps.warmup + steps.timed:
        return steps
    warmup = min(steps.warmup, 1)
    timed = min(steps.timed, max(least, int(room) - warmup))
    fixed = steps.timed == steps.most_timed
    return replace(steps, warmup=warmup, timed=timed, most_timed=timed if fixed else steps.most_timed)


def fits_well(record: Record) -> bool:
    """Whether the trial fitted, and its allocator never had to flush and try again: it would in every step to come."""
    return isinstance(record.outcome, Fit) and record.outcome.alloc_retries == 0


def fits_within(record: Record, usable_bytes: float) -> bool:
    """Whether the trial fitted well and left the headroom free on the device."""
    return fits_well(record) and isinstance(record.outcome, Fit) and record.outcome.device_peak_bytes <= usable_bytes


def samples_per_second(record: Record) -> float:
    """The objective; 0 for a trial that did not fit."""
    return record.outcome.samples_per_second if isinstance(record.outcome, Fit) else 0.0


def median_step_s(record: Record) -> float:
    """Seconds of its median step; 0 for a trial that did not fit."""
    fit = record.outcome
    return median(fit.step_s) if isinstance(fit, Fit) and fit.step_s else 0.0


def is_same_config(one: Record, other: Record) -> bool:
    """Whether two trials ran the same config, whatever they were asked for."""
    return (one.trial.rung, one.trial.knobs) == (other.trial.rung, other.trial.knobs)


def memory_score(record: Record) -> float:
    """The objective where memory is what counts: more for a smaller peak; 0 for a trial that did not fit."""
    return 1 / max(1, record.outcome.device_peak_bytes) if isinstance(record.outcome, Fit) else 0.0


def score_function(objective: str) -> Callable[[Record], float]:
    """What is to be as large as possible. A sample has the same tokens in every trial, so one order holds for both."""
    return memory_score if objective == "memory" else samples_per_second
