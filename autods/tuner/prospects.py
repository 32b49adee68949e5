"""What the forecast expects of a config: its best micro batch and its rate. The best prospects are tried first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from ..config.checkpointing import may_offload
from ..events import Note
from ..forecast.predict.step_time import CLOSE, find_fastest
from ..forecast.predict.verdict import is_surer, may_fit_offloaded
from ..forecast.simulation_cache import count_parallel_engines
from ..types import Trial
from .candidates import Candidate, first_trial, in_state, without_checkpointing
from .trials import FitContext

MOST_AT_FIRST = 64  # micro batch: a thousand samples may fit where throughput stops growing at twenty
Ranked = TypeVar("Ranked")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """The forecast of a config at the micro batch to begin with, and at the largest that fits by the forecast.

    `rate` is that of `micro_batch`, in samples a second of all ranks. `most_rate` is the one of `largest`, if its step
    takes as little as the forecast's interval allows: a larger micro batch shares a step's fixed costs.
    `sample_s` are the seconds of one more sample in a micro step; 0 where one micro batch alone may fit.
    """

    micro_batch: int
    largest: int
    rate: float
    most_rate: float
    sample_s: float = 0.0


def find_prospect(candidate: Candidate, context: FitContext) -> Prospect | None:
    """The prospect of a config; None where nothing is known of its memory or its step time, or nothing fits."""
    if context.settings.objective == "memory" or candidate.skip is not None:
        return None
    first = first_trial(candidate, context.settings.profile.timed, context.sizes[0])

    def trial_at(micro_batch: int) -> Trial:
        return replace(first, knobs=context.resize(first.knobs, micro_batch))

    smallest = trial_at(context.sizes[0])
    shortest = context.forecaster.step_time(smallest)
    if shortest is None:  # before the search for the largest, which simulates more
        return None
    largest = context.forecaster.largest(smallest, context.sizes, context.usable_bytes)
    if largest is None:
        return None

    def samples(size: int) -> int:
        return trial_at(size).knobs.train_batch(context.world_size)

    micro_batch = largest
    if context.settings.global_batch is None:
        micro_batch = max(context.sizes[0], min(largest, MOST_AT_FIRST))
    step, longest = context.forecaster.step_time(trial_at(micro_batch)), context.forecaster.step_time(trial_at(largest))
    if step is None or longest is None or step.seconds <= 0:
        return None
    calm = context.forecaster.largest_calm(smallest, [size for size in context.sizes if size <= micro_batch])
    if calm is not None and calm != micro_batch:  # a larger one gives memory back in each step, which takes time
        calmer = context.forecaster.step_time(trial_at(calm))
        if calmer is not None and samples(calm) * step.seconds >= samples(micro_batch) * calmer.seconds:
            micro_batch, step = calm, calmer

    longest_s = longest.seconds / trial_at(largest).knobs.accumulation
    more_s, more = longest_s - shortest.seconds / smallest.knobs.accumulation, largest - smallest.knobs.micro_batch

    return Prospect(
        micro_batch=micro_batch,
        largest=largest,
        rate=samples(micro_batch) / step.seconds,
        most_rate=samples(largest) / longest.low_seconds if longest.low_seconds else math.inf,
        sample_s=max(0.0, more_s) / more if more else 0.0,
    )


def forecast_rate(trial: Trial, context: FitContext) -> float | None:
    """The samples a second of all ranks by the trial's forecast; None when its step time is not known."""
    step = context.forecaster.step_time(trial)
    return None if step is None else trial.knobs.train_batch(context.world_size) / step.seconds


def has_choice(candidate: Candidate, context: FitContext) -> bool:
    """Whether the config may also be tried without checkpointing."""
    return context.settings.profile.race.checkpointing and bool(candidate.knobs.checkpointing)


def favours(config: Candidate, other: Candidate, context: FitContext) -> bool:
    """Whether the forecast finds the config clearly faster than the other."""
    first, second = find_prospect(config, context), find_prospect(other, context)
    return first is not None and second is not None and first.rate > (1 + CLOSE) * second.rate


def rank(items: Sequence[Ranked], rates: Sequence[float | None]) -> list[Ranked]:
    """The items by their rates, the highest first; within 3 % in the given order. Those without a rate come last."""
    left = list(range(len(items)))
    order: list[int] = []
    while (place := find_fastest([rates[each] for each in left])) is not None:
        order.append(left.pop(place))
    return [items[each] for each in (*order, *left)]


def offload_where_needed(candidates: Sequence[Candidate], context: FitContext) -> tuple[Candidate, ...]:
    """The candidates; layers' inputs are on the host where a rung should not fit otherwise by its forecast."""
    settings, smallest = context.settings, context.sizes[0]

    def choose(candidate: Candidate) -> Candidate:
        if candidate.skip is not None or not may_offload(candidate.knobs, settings.source.form, settings.device):
            return candidate
        plain = context.forecast(first_trial(candidate, settings.profile.walk, smallest))
        if plain is None or not may_fit_offloaded(plain):
            return candidate
        leaner = in_state(candidate, "offload")
        forecast = context.forecast(first_trial(leaner, settings.profile.walk, smallest))
        return leaner if forecast is not None and is_surer(forecast, plain) else candidate

    if settings.forecast:
        context.memory.listen(Note(text="forecasting the memory of each rung"))
    with ThreadPoolExecutor(count_parallel_engines()) as pool:
        return tuple(pool.map(choose, candidates))


def order_by_time(candidates: Sequence[Candidate], context: FitContext) -> list[Candidate]:
    """The candidates by their forecast rates, with or without checkpointing; in the given order where none is known.

    A rung that keeps states on NVMe comes last: they pass through it in every step, and its op takes minutes to build.
    """

    def find_rate(candidate: Candidate) -> float | None:
        prospect = find_prospect(candidate, context)
        if prospect is None:  # without checkpointing it needs more memory still
            return None
        if not has_choice(candidate, context):
            return prospect.rate
        plain = find_prospect(without_checkpointing(candidate), context)
        return prospect.rate if plain is None else max(prospect.rate, plain.rate)

    steps, smallest = context.settings.profile.timed, context.sizes[0]
    firsts = (first_trial(each, steps, smallest) for each in candidates if each.skip is None)
    if context.settings.objective == "memory" or not any(context.forecaster.step_time(first) for first in firsts):
        return list(candidates)
    context.memory.listen(Note(text="forecasting the step time of each rung at its best micro batch"))
    with ThreadPoolExecutor(count_parallel_engines()) as pool:
        rates = list(pool.map(find_rate, candidates))
    ranked = rank(candidates, rates)
    return sorted(ranked, key=lambda candidate: candidate.rung.uses_nvme)
