"""The winner's micro batch, once more. A race stops where a step takes long or a rival's trials are spent, since most
of what it looks at loses; the winner is what will train, and a few percent of that are worth a long trial."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..values import Record, Steps
from .ask import fits_within
from .bounds import last_sample_s, micro_step_seconds
from .climb import Climb
from .memory_line import next_size
from .stopping import Stop

_WORTH = 1.02  # times as fast, by the line through its steps
_MOST_TRIALS = 2
_LEAST_STEPS = 2
_SHARE = 0.25  # of the time that the search took, for one trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Further:
    """What is known when the race is over. sample_s: what one more sample costs. spent_s: of the search."""

    steps: Steps
    sample_s: float
    spent_s: float
    may_run: Callable[[int], bool]

    def grown(self, best: Record, climb: Climb) -> Record:
        """The winner's trial, or that of a larger micro batch that was measured to be faster."""
        climb.rules = replace(climb.rules, steps=self.steps)
        for _ in range(_MOST_TRIALS):
            size = self._size(best, climb)
            if size is None or not self.may_run(1):
                break
            record = climb.measure(size)
            if not fits_within(record, climb.rules.usable_bytes):
                continue
            ratio = climb.rules.score(record) / climb.rules.score(best)
            small = best.trial.knobs.micro_batch
            climb.stop = Stop(is_limit=False, reason=f"micro batch {size} is {ratio:.2f} times as fast as {small}")
            if ratio <= 1:
                break
            best = record
        return best

    def _size(self, best: Record, climb: Climb) -> int | None:
        """The largest that memory and time allow, where it promises enough."""
        rules, small = climb.rules, best.trial.knobs.micro_batch
        most = next_size(climb.ground, rules.sizes)
        if most is None or not rules.grows:
            return None
        trial_s = _SHARE * self.spent_s / (self.steps.warmup + _LEAST_STEPS)
        sizes = [one for one in rules.sizes if small < one <= most and self._step_s(climb, one) <= trial_s]
        if not sizes:
            return None
        faster = sizes[-1] / self._micro_step_s(climb, sizes[-1]) / (small / self._micro_step_s(climb, small))
        return sizes[-1] if faster >= _WORTH else None

    def _step_s(self, climb: Climb, size: int) -> float:
        return self._micro_step_s(climb, size) * climb.accumulation(size)

    def _micro_step_s(self, climb: Climb, size: int) -> float:
        """As measured, or along the line beyond it."""
        times = micro_step_seconds(climb.seen)
        if size in times:
            return times[size]
        last = max(times)
        return times[last] + max(self.sample_s, last_sample_s(times)) * (size - last)
