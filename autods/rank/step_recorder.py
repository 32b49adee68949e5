"""The optimizer steps of a trial on one rank: which of them count, their times and losses, and whether they suffice."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..types import Steps
from ..workload.protocol import WorkloadError
from .distributed import Ranks
from .record import RankResult

_MOST_SKIPPED = 40  # in a row; the largest first loss scale of DeepSpeed is 2**32, and each skipped step halves it
_MOST_NOT_FINITE = 4  # losses in a row of skipped steps: a smaller loss scale mends gradients, and no loss


@dataclass(slots=True)
class StepRecorder:
    """Records the optimizer steps of a trial, a model's and a script's alike. Every rank records each of them.

    A step that DeepSpeed skipped counts for nothing, because the optimizer did not run. `times` has the seconds of each
    other step, the warm-up included, `losses` its loss, and `held_bytes` what was in use on the device after it.
    `skipped` is the number of skipped steps, `steps_s` the seconds of all steps.
    """

    steps: Steps
    times: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    held_bytes: list[int] = field(default_factory=list)
    skipped: int = 0
    steps_s: float = 0.0
    _seen: int = 0
    _skipped_in_a_row: int = 0
    _not_finite_in_a_row: int = 0

    def record(
        self, seconds: float, losses: Sequence[Any], held_bytes: int, *, skipped: bool = False, is_whole: bool = True
    ) -> None:
        """Record an optimizer step. Its loss is the mean of `losses`, numbers or tensors, of which there may be none.

        A step is not timed unless `is_whole`: its batches have all their samples.
        Raises WorkloadError for a loss that is not finite, and for steps that are skipped without end.
        """
        self._seen += 1
        self.steps_s += seconds
        self.skipped += skipped
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        loss = statistics.fmean(map(float, losses)) if losses else 0.0
        self._not_finite_in_a_row = 0 if math.isfinite(loss) else self._not_finite_in_a_row + 1
        if self._not_finite_in_a_row > (_MOST_NOT_FINITE if skipped else 0):
            raise WorkloadError(
                f"the loss is {loss} at step {self._seen - self._not_finite_in_a_row + 1}",
                hint="check the data, the learning rate and the initialisation",
            )
        if self._skipped_in_a_row > _MOST_SKIPPED:
            raise WorkloadError(
                f"{self._skipped_in_a_row} optimizer steps in a row were skipped, because gradients in fp16 overflowed",
                hint="lower fp16.initial_scale_power or fp16.loss_scale, or train in bf16",
            )
        if skipped:
            return
        self.held_bytes.append(held_bytes)
        if is_whole:
            self.times.append(seconds)
        if losses:
            self.losses.append(loss)

    @property
    def timed(self) -> tuple[float, ...]:
        """The seconds of each timed step."""
        return tuple(self.times[self.steps.warmup :])

    def has_enough(self, ranks: Ranks) -> bool:
        """Whether no more timed steps are needed: they are precise enough, or their number or time is spent.

        Rank 0 decides for all: ranks have to end together, and may disagree about times and about which steps count.
        """
        steps, timed = self.steps, self.timed
        if self._seen < steps.warmup + steps.timed:
            return False
        return ranks.agree(
            len(timed) >= steps.timed
            and (len(timed) >= steps.most_timed or is_enough(timed, steps, elapsed_s=self.steps_s))
        )

    def result(self, **others: Any) -> RankResult:
        """Return what was measured, with `others` of its fields."""
        return RankResult(
            step_s=self.timed,
            steps_s=self.steps_s,
            losses=tuple(self.losses),
            skipped_steps=self.skipped,
            **others,
        )


def was_skipped(engine: Any) -> bool:
    """Whether the last optimizer step changed no weights: gradients in fp16 overflowed, and the loss scale is halved.

    All ranks get the same answer. DeepSpeed's optimizers and its engine's `skipped_steps` go by this attribute, too.
    """
    return bool(getattr(engine.optimizer, "overflow", False))


def relative_error(times: Sequence[float]) -> float:
    """Return the relative standard error of the median, (1.2533 σ/√n) / median; 0 for a single time."""
    if len(times) < 2:
        return 0.0
    return 1.2533 * statistics.stdev(times) / math.sqrt(len(times)) / statistics.median(times)


def is_enough(times: Sequence[float], steps: Steps, *, elapsed_s: float) -> bool:
    """Whether the median step time is precise enough, or the time budget is spent."""
    return relative_error(times) <= steps.spread or elapsed_s >= steps.budget_s
