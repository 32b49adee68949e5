"""How many optimizer steps a trial runs: those that warm up, and timed ones until there are enough."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..types import Steps
from ..workload.protocol import WorkloadError
from .distributed import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Acted:
    """What the steps showed. `step_s` are the timed steps, `steps_s` all steps with the warm-up.

    examined: `Examined` as a dict, of a worst_case exam. communication: `Communication` of this rank as a dict.
    """

    step_s: tuple[float, ...]
    steps_s: float
    losses: tuple[float, ...]
    examined: Mapping[str, Any] | None = None
    communication: Mapping[str, Any] | None = None


def repeat(
    step: Callable[[int], Sequence[Any]],
    join: Callable[[Sequence[float]], float],
    steps: Steps,
    synchronize: Callable[[], None],
    ranks: Ranks,
) -> Acted:
    """Optimizer steps until there are enough of them. join: the losses of a step's batches → that of the step."""
    began = time.perf_counter()
    times: list[float] = []
    losses: list[float] = []
    while True:
        index = len(losses)
        synchronize()
        start = time.perf_counter()
        found = step(index)
        synchronize()
        took_s = time.perf_counter() - start
        if index >= steps.warmup:
            times.append(took_s)
        losses.append(join([finite(loss, index) for loss in found]))
        # Ranks must stop together; where the number of steps is fixed there is nothing to agree on.
        if len(times) >= steps.timed and (
            len(times) >= steps.most_timed or ranks.agree(enough(times, steps, time.perf_counter() - began))
        ):
            break
    return Acted(step_s=tuple(times), steps_s=time.perf_counter() - began, losses=tuple(losses))


def spread_of(times: Sequence[float]) -> float:
    """Relative standard error of the median, (1.2533 σ/√n) / median; 0 for a single time."""
    if len(times) < 2:
        return 0.0
    return 1.2533 * statistics.stdev(times) / math.sqrt(len(times)) / statistics.median(times)


def enough(times: Sequence[float], steps: Steps, elapsed_s: float) -> bool:
    """Whether the median is known well enough, or the time for knowing it better is spent."""
    return spread_of(times) <= steps.spread or elapsed_s >= steps.budget_s


def has_time_for_one_more(acted: Acted, steps: Steps) -> bool:
    """Whether these steps ask how fast, and not only whether it fits, and took less than they may."""
    step_s = statistics.median(acted.step_s) if acted.step_s else acted.steps_s / len(acted.losses)
    return steps.most_timed > 1 and acted.steps_s + 2 * step_s <= steps.budget_s


def finite(loss: Any, index: int) -> float:
    """The loss of that step as a number. Raises WorkloadError when it is none."""
    value = float(loss.detach())
    if not math.isfinite(value):
        raise WorkloadError(
            f"the loss is {value} at step {index + 1}", hint="check the data, the learning rate and the initialisation"
        )
    return value
