"""The climb of one config's micro batch, a trial at a time: what is tried next follows from what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..outcomes import Fit
from ..profile import AccumulateLimits, GrowLimits
from ..values import Record, Run, Steps, Trial
from .accumulate import worth_of
from .ask import accumulation_for, asked_with_exam, fits_within, micro_batches, paced, samples_per_second
from .bounds import micro_step_seconds
from .early import is_mostly_steps, last_from_s, next_look, when_little_is_left
from .foresight import BLIND, Foresight
from .memory_line import Ground, next_size, survey
from .stopping import Stop, predicted_s, step_seconds, when_found, when_saturated, when_slow, when_spent

_FIRST_LOOK = 64  # micro batch
# Times as long as the shortest step: so long a step may take, even where that is more than its budget.
_LONGER_STEPS = 2
_WORTH_A_LONG_STEP = 1.15  # times the micro batch: less growth is not worth a trial whose steps are about too long
_SURELY_SLOWER = 1.5  # times; the walk times one step, after one that warms up
_AS_SURELY = 1.15  # times; where other trials hardly time more steps than that


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What holds for every climb of a fit. grows: False leaves the micro batch at the smallest. examines: what a climb
    ends with is likely to be certified, and has its exam at the end of its trial where that is seen in time.
    accumulate: more micro batches a step may be taken where they pay, so that growing need not share the optimizer's
    part; None: a step has as many as the global batch asks for."""

    run: Run
    limits: GrowLimits
    steps: Steps
    usable_bytes: float
    world_size: int
    global_batch: int | None
    foresight: Foresight = BLIND
    score: Callable[[Record], float] = samples_per_second
    grows: bool = True
    examines: bool = False
    accumulate: AccumulateLimits | None = None

    @property
    def sizes(self) -> Sequence[int]:
        """The micro batches that may be tried, ascending."""
        most = self.limits.most_micro_batch if self.grows else 1
        return micro_batches(self.global_batch, self.world_size, most)


@dataclass(slots=True, kw_only=True)
class Climb:
    """One config's climb.

    first: its trial at micro batch 1, or the smallest that can be trained. walked: that trial's record where it
    fitted; its steps hardly count as timed. records: what was measured since. stop: why the climb ended. like: trials
    of another config of the same model, by which the length of steps is guessed until they are measured.
    """

    rules: Rules
    first: Trial
    walked: Record | None = None
    records: list[Record] = field(default_factory=list)
    stop: Stop | None = None
    like: Sequence[Record] = ()
    _foreseen: list[int | None] = field(default_factory=list)  # asked once: it costs a simulation

    @property
    def seen(self) -> tuple[Record, ...]:
        """All records, the walk's first."""
        return (*((self.walked,) if self.walked else ()), *self.records)

    @property
    def ground(self) -> Ground:
        """What is known of its memory; something must have fitted."""
        return survey(self.seen, self.rules.usable_bytes)

    def goes_on(self) -> bool:
        """Run one more trial; False when there is nothing more to try, and `stop` says why."""
        choice = self._choose()
        if isinstance(choice, Stop):
            self.stop = choice
            return False
        self.measure(choice)
        return True

    def ends(self) -> None:
        """Climb to the end. The smallest is timed when nothing larger was, or when the smallest timed is fastest."""
        while self.stop is None and self.goes_on():
            pass
        if self._worth_timing_the_first():
            self.measure(self.first.knobs.micro_batch)

    def measure(self, micro_batch: int) -> Record:
        """One micro batch, timed, with as many of them a step as `accumulation` says."""
        accumulation = self.accumulation(micro_batch)
        knobs = replace(self.first.knobs, micro_batch=micro_batch, accumulation=accumulation)
        least = 2 if accumulation == 1 or self.rules.global_batch is not None else 1  # several alike are one long step
        steps = paced(self.rules.steps, self.expected_s(micro_batch), least=least)
        trial = replace(self.first, knobs=knobs, purpose="grow", steps=steps, repeat=0)
        from_s = self._last_from_s(micro_batch)
        trial = replace(trial, examined_from_s=None if from_s is None else accumulation * from_s)
        self.records.extend(asked_with_exam(trial, self.rules.run))
        return self.records[-1]

    def accumulation(self, micro_batch: int) -> int:
        """Micro batches a step: those that keep the global batch. Where that is open and growing begins small, as many
        as pay: what that trial times is what will train."""
        rules = self.rules
        if rules.accumulate is None or not self._is_brief:
            return accumulation_for(rules.global_batch, micro_batch, rules.world_size)
        return worth_of(self.seen, self._micro_step_s(micro_batch), limits=rules.accumulate, steps=rules.steps)

    def _last_from_s(self, micro_batch: int) -> float | None:
        """Seconds of a micro step from which on this trial is the climb's last; None where nobody can say before."""
        if not self.rules.examines or not self._is_brief:
            return None
        return last_from_s(self._early_times, micro_batch, self.longest_step_s, self.rules.limits.worth)

    @property
    def _is_brief(self) -> bool:
        """Whether growing begins small and ends early, as the profile says. With a global batch a step has the same
        samples at every micro batch, and its seconds say something else."""
        look = self.rules.limits.first_look
        return self.rules.global_batch is None and look > 0 and is_mostly_steps(self.walked, self.rules.steps, look)

    @property
    def _early_times(self) -> Mapping[int, float]:
        """Seconds of a micro step, as far as a larger micro batch is what makes them worth more."""
        return micro_step_seconds(self.seen, updates=self.rules.accumulate is None)

    def expected_s(self, micro_batch: int) -> float:
        """Seconds of a step, as far as can be said; 0 where nothing can."""
        return self.accumulation(micro_batch) * self._micro_step_s(micro_batch)

    def _micro_step_s(self, micro_batch: int) -> float:
        """The same of one of its micro batches."""
        times, like = micro_step_seconds(self.seen), micro_step_seconds(self.like)
        if len(times) == 1 and len(like) > 1:  # one point does not tell how steps grow: the same model's do
            ((size, seconds),) = times.items()
            return seconds * _along(like, micro_batch) / _along(like, size)
        return _along(times or like, micro_batch)

    @property
    def longest_step_s(self) -> float:
        """What a step may take at most to be timed. A large model's is long whatever the batch, so that is said in the
        shortest that is known, too, which is not this config's where it began with a large micro batch."""
        known = (*step_seconds(self.seen).values(), *step_seconds(self.like).values())
        return max(self.rules.steps.budget_s, _LONGER_STEPS * min(known, default=0.0))

    def foreseen(self) -> int | None:
        """The largest micro batch that the forecast lets in; None when it cannot say."""
        if not self._foreseen:
            knobs = replace(self.first.knobs, accumulation=self.accumulation(1))
            trial = replace(self.first, knobs=knobs, purpose="grow", steps=self.rules.steps, repeat=0)
            self._foreseen.append(self.rules.foresight.largest(trial, self.rules.sizes, self.rules.usable_bytes))
        return self._foreseen[0]

    def eligible(self) -> list[Record]:
        """The timed trials that leave the headroom; micro batch 1 need not, since there is nothing smaller.

        Where timing failed although the walk's trial fitted, that one, with the global batch kept.
        """
        eligible = [
            record
            for record in self.records
            if isinstance(record.outcome, Fit)
            and (record.trial.knobs.micro_batch == 1 or fits_within(record, self.rules.usable_bytes))
        ]
        if eligible or self.walked is None:
            return eligible
        accumulation = accumulation_for(self.rules.global_batch, 1, self.rules.world_size)
        knobs = replace(self.walked.trial.knobs, accumulation=accumulation)
        return [replace(self.walked, trial=replace(self.walked.trial, knobs=knobs))]

    def best(self) -> Record | None:
        """The best of these."""
        return max(self.eligible(), key=self.rules.score, default=None)

    def _choose(self) -> int | Stop:
        """The next micro batch, or why the climb stops here."""
        rules, sizes, ground = self.rules, self.rules.sizes, self.ground
        if (stop := when_saturated(self.records, ground, sizes, rules.limits.gain)) is not None:
            return stop
        if self._is_brief and self.records:
            last = self.records[-1].trial.knobs.micro_batch
            times = self._early_times
            if (stop := when_little_is_left(times, last, self.longest_step_s, rules.limits.worth)) is not None:
                return stop
        size = self._foreseen_first(ground) or next_size(ground, sizes)
        if size is None:
            share = None if rules.global_batch is None else rules.global_batch // rules.world_size
            return when_found(ground, sizes, self.records, share)
        if len(self.records) >= rules.limits.most_trials:
            return when_spent(ground, rules.limits.most_trials)
        if rules.global_batch is not None:
            return size  # a step has the same samples at every micro batch: growing never makes it much slower
        budget_s = self.longest_step_s
        open_sizes = ground.between(sizes)
        quick = [one for one in open_sizes if one <= size and self._micro_step_s(one) <= budget_s]
        if quick and (quick[-1] == size or quick[-1] >= _WORTH_A_LONG_STEP * ground.good):
            look = self._look(budget_s)
            return max((one for one in quick if one <= look), default=quick[-1])
        slow = next(one for one in open_sizes if one not in quick)
        return when_slow(slow, self._micro_step_s(slow), budget_s)

    def _look(self, longest_s: float) -> float:
        """How large the next micro batch may be where growing begins small."""
        if not self._is_brief:
            return math.inf
        if not self.records:
            return self.rules.limits.first_look
        return next_look(self._early_times, self.records[-1].trial.knobs.micro_batch, longest_s)

    def _foreseen_first(self, ground: Ground) -> int | None:
        """The forecast's micro batch: to begin with, and as long as measured peaks say nothing of how they grow."""
        if self.records and (not self._foreseen or not math.isinf(ground.allowed() or 0.0)):
            return None
        most = self.foreseen() or 0
        if not self.records and self.rules.global_batch is None:
            most = min(most, _FIRST_LOOK)  # a thousand samples may fit, and speed have come to its end at twenty
        return max((size for size in ground.between(self.rules.sizes) if size <= most), default=None)

    def _worth_timing_the_first(self) -> bool:
        timed = [record for record in self.records if fits_within(record, self.rules.usable_bytes)]
        if not timed:
            return True
        best = max(timed, key=self.rules.score)
        fastest = best.trial.knobs.micro_batch
        if self._walked_was_slower(best):
            return False
        smallest = min(record.trial.knobs.micro_batch for record in timed)
        return fastest == smallest > self.first.knobs.micro_batch and len(self.records) < self.rules.limits.most_trials

    def _walked_was_slower(self, best: Record) -> bool:
        """Whether the walk's short look at micro batch 1 says enough. With a global batch it took fewer micro batches
        a step than growing does, and its samples paid more of what a step costs."""
        if self.walked is None or self.rules.global_batch is not None:
            return False
        sure = _AS_SURELY if self.rules.steps.most_timed <= 2 else _SURELY_SLOWER
        return sure * samples_per_second(self.walked) < samples_per_second(best)


def _along(times: Mapping[int, float], micro_batch: int) -> float:
    """Seconds of a step: as measured, between two that were, or beyond; 0 where nothing is known."""
    if micro_batch in times or not times:
        return times.get(micro_batch, 0.0)
    below, above = [size for size in times if size < micro_batch], [size for size in times if size > micro_batch]
    if not above:
        return predicted_s(times, micro_batch)
    right = min(above)
    if not below:
        return times[right] * micro_batch / right
    left = max(below)
    return times[left] + (times[right] - times[left]) * (micro_batch - left) / (right - left)
