"""Grow the micro batch of the rung that fits: the largest that memory allows, as far as it pays, in few trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..settings import GrowLimits
from ..values import Fit, Record, Run, Steps
from .ask import accumulation_for, asked, fits_within, micro_batches, samples_per_second
from .foresight import BLIND, Foresight
from .memory_line import Ground, next_size, survey
from .stopping import Stop, predicted_s, step_seconds, when_found, when_saturated, when_slow, when_spent


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """What growing found.

    best: the fastest timed trial. largest_micro_batch: the largest seen to fit with the headroom.
    largest_is_limit: larger ones do not run; otherwise growing stopped for another `reason`, a sentence.
    """

    best: Record
    records: tuple[Record, ...]
    largest_micro_batch: int
    largest_is_limit: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Climb:
    """What is given and stays."""

    winner: Record
    run: Run
    limits: GrowLimits
    steps: Steps
    usable_bytes: float
    world_size: int
    global_batch: int | None
    foresight: Foresight

    def foreseen(self, sizes: Sequence[int]) -> int | None:
        """The largest of these that the forecast lets in, more than 1."""
        knobs = replace(self.winner.trial.knobs, accumulation=accumulation_for(self.global_batch, 1, self.world_size))
        trial = replace(self.winner.trial, knobs=knobs, purpose="grow", steps=self.steps, repeat=0)
        size = self.foresight.largest(trial, sizes, self.usable_bytes)
        return size if size is not None and size > 1 else None

    def measure(self, micro_batch: int) -> tuple[Record, ...]:
        """One micro batch, timed, with the accumulation that keeps the global batch."""
        accumulation = accumulation_for(self.global_batch, micro_batch, self.world_size)
        knobs = replace(self.winner.trial.knobs, micro_batch=micro_batch, accumulation=accumulation)
        trial = replace(self.winner.trial, knobs=knobs, purpose="grow", steps=self.steps, repeat=0)
        return asked(trial, self.run)


def grow(
    winner: Record,
    run: Run,
    *,
    limits: GrowLimits,
    steps: Steps,
    limit_bytes: int,
    headroom: float,
    world_size: int,
    global_batch: int | None,
    foresight: Foresight = BLIND,
) -> Grown:
    """Grow from the walk's winner (micro batch 1, not timed) within limit_bytes × (1 − headroom) of the device.

    It begins at the micro batch that the forecast lets in, and goes on by what trials measure.
    """
    usable_bytes = limit_bytes * (1 - headroom)
    climb = _Climb(
        winner=winner,
        run=run,
        limits=limits,
        steps=steps,
        usable_bytes=usable_bytes,
        world_size=world_size,
        global_batch=global_batch,
        foresight=foresight,
    )
    sizes = micro_batches(global_batch, world_size, limits.most_micro_batch)
    records: list[Record] = []
    while True:
        ground = survey((winner, *records), usable_bytes)
        choice = _choose(climb, records, ground, sizes)
        if isinstance(choice, Stop):
            break
        records.extend(climb.measure(choice))
    if _worth_timing_the_first(climb, records):
        records.extend(climb.measure(1))
    return Grown(
        best=_best(climb, records),
        records=tuple(records),
        largest_micro_batch=ground.good,
        largest_is_limit=choice.is_limit,
        reason=choice.reason,
    )


def _choose(climb: _Climb, records: Sequence[Record], ground: Ground, sizes: Sequence[int]) -> int | Stop:
    """The next micro batch, or why growing stops here."""
    if (stop := when_saturated(records, ground, sizes, climb.limits.gain)) is not None:
        return stop
    size = (climb.foreseen(sizes) if not records else None) or next_size(ground, sizes)
    if size is None:
        share = None if climb.global_batch is None else climb.global_batch // climb.world_size
        return when_found(ground, sizes, records, share)
    if len(records) >= climb.limits.most_trials:
        return when_spent(ground, climb.limits.most_trials)
    if climb.global_batch is not None:
        return size  # a step has the same samples at every micro batch: growing never makes it much slower
    times, budget_s = step_seconds((climb.winner, *records)), climb.steps.budget_s
    open_sizes = ground.between(sizes)
    quick = [one for one in open_sizes if one <= size and predicted_s(times, one) <= budget_s]
    return quick[-1] if quick else when_slow(open_sizes[0], predicted_s(times, open_sizes[0]), budget_s)


def _worth_timing_the_first(climb: _Climb, records: Sequence[Record]) -> bool:
    """Micro batch 1 is timed when nothing larger was, or when the smallest that was is also the fastest."""
    timed = [record for record in records if fits_within(record, climb.usable_bytes)]
    if not timed:
        return True
    fastest = max(timed, key=samples_per_second).trial.knobs.micro_batch
    smallest = min(record.trial.knobs.micro_batch for record in timed)
    return fastest == smallest and len(records) < climb.limits.most_trials


def _best(climb: _Climb, records: Sequence[Record]) -> Record:
    """The fastest that leaves the headroom; micro batch 1 need not, since there is nothing smaller."""
    eligible = [
        record
        for record in records
        if isinstance(record.outcome, Fit)
        and (record.trial.knobs.micro_batch == 1 or fits_within(record, climb.usable_bytes))
    ]
    if eligible:
        return max(eligible, key=samples_per_second)
    # Timing micro batch 1 failed although the walk's trial of it fitted: go by that one, with the global batch kept.
    accumulation = accumulation_for(climb.global_batch, 1, climb.world_size)
    knobs = replace(climb.winner.trial.knobs, accumulation=accumulation)
    return replace(climb.winner, trial=replace(climb.winner.trial, knobs=knobs))
