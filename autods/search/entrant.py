"""One config in the race: how it enters, how far its micro batch may grow, and why it is out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..forecast.values import RungForecast
from ..outcomes import Fit
from ..units import show_bytes
from ..values import Record, Steps, Trial
from .ask import accumulation_for, fits_within
from .bounds import SURE, micro_step_seconds
from .candidates import Candidate
from .climb import Climb, Rules
from .foresight import why_impossible
from .stopping import what_happened
from .variants import name_of
from .walk import first_trial, tried

_TRIES = 3


@dataclass(slots=True, kw_only=True)
class Entrant:
    """A config and its climb.

    name: the rung, and what differs from its usual knobs. size: the micro batch with which it enters. out: why it is
    out, if it is. walked: the trials that looked whether it fits at all.
    """

    name: str
    candidate: Candidate
    climb: Climb
    size: int = 1
    out: str | None = None
    walked: tuple[Record, ...] = ()

    @property
    def records(self) -> tuple[Record, ...]:
        """All trials of it."""
        return (*self.walked, *self.climb.records)

    def trial_at(self, micro_batch: int) -> Trial:
        """What the climb would measure."""
        rules = self.climb.rules
        accumulation = accumulation_for(rules.global_batch, micro_batch, rules.world_size)
        knobs = replace(self.candidate.knobs, micro_batch=micro_batch, accumulation=accumulation)
        return replace(self.climb.first, knobs=knobs, purpose="grow", steps=rules.steps)

    def foresee(self) -> None:
        """Make the size smaller where its forecast says so; out, where nothing can fit."""
        rules = self.climb.rules
        forecast = rules.foresight.forecast(self.trial_at(self.size))
        if forecast is None:
            self.size = 1
        elif not _has_room(forecast, rules.usable_bytes):
            smallest = rules.sizes[0]
            self.out = why_impossible(rules.foresight.forecast(self.trial_at(smallest)))
            if self.out is None:
                self.size = min(self.size, self.climb.foreseen() or smallest)

    def enter(self, walk_steps: Steps) -> None:
        """The first trials: at its size, at a smaller one where that does not do, and else as the walk looks at it."""
        rules, size = self.climb.rules, self.size
        for _ in range(_TRIES):
            if size <= rules.sizes[0]:
                break
            record = self.climb.measure(size)
            if fits_within(record, rules.usable_bytes):
                return
            size = _smaller(record, rules)
            more = replace(rules.limits, most_trials=rules.limits.most_trials + len(self.climb.records))
            self.climb.rules = replace(rules, limits=more)  # a size that was too bold takes no trial from the climb
        self._walk(walk_steps)

    def _walk(self, steps: Steps) -> None:
        rules = self.climb.rules
        self.walked = tried(self.candidate, rules.run, steps)
        last = self.walked[-1]
        if not isinstance(last.outcome, Fit):
            self.out = what_happened(last, show_bytes(rules.usable_bytes))
            return
        if last.trial.knobs.settings != self.candidate.knobs.settings:  # unpinned: no earlier trial speaks of it
            self.walked, self.climb.records = (*self.climb.records, *self.walked), []
            knobs = replace(self.candidate.knobs, settings=last.trial.knobs.settings)
            self.candidate = replace(self.candidate, knobs=knobs, pinned=())
        self.climb.first = last.trial
        self.climb.walked = last
        if not self.climb.records:
            self.climb.goes_on()

    def tries(self, size: int) -> bool:
        """Measure a micro batch near this one, or as far above what ran as is safe; False when there is none."""
        known = {record.trial.knobs.micro_batch for record in self.climb.seen}
        if size > self.climb.ground.good:
            return self.climb.stop is None and self.climb.goes_on()
        below = max((one for one in known if one <= size), default=0)
        above = min((one for one in known if one > size), default=math.inf)
        sizes = [one for one in self.climb.rules.sizes if below < one < above]
        if not sizes:
            return False
        self.climb.measure(max((one for one in sizes if one <= size), default=sizes[0]))
        return True

    def most(self) -> float:
        """The largest micro batch that it may reach: as its measured peaks say, else as its forecast does."""
        rules = self.climb.rules
        if not self.climb.seen:
            return math.inf
        ground = self.climb.ground
        allowed = ground.allowed()
        if allowed is None or math.isinf(allowed):
            foreseen = self.climb.foreseen()
            allowed = rules.sizes[-1] if foreseen is None else max(foreseen, ground.good)
        return min(rules.sizes[-1], allowed, math.inf if ground.bad is None else ground.bad - 1)

    def longest(self, sample_s: float) -> float:
        """The largest micro batch whose step is short enough to be timed, where a sample costs so many seconds."""
        times = micro_step_seconds(self.climb.seen)
        if self.climb.rules.global_batch is not None or not times or sample_s <= 0:
            return math.inf
        size = max(times)
        return max(size, size + (self.climb.longest_step_s - times[size]) / (SURE * sample_s))

    def said(self) -> str:
        """How fast its best was; how lean, where that is what counts."""
        best = self.climb.best()
        if best is None or not isinstance(best.outcome, Fit):
            return "never fitted"
        if not self.climb.rules.grows:
            return f"needs {show_bytes(best.outcome.device_peak_bytes)}"
        return f"{best.outcome.samples_per_second:.3g} samples/s with micro batch {best.trial.knobs.micro_batch}"


def entrant_of(candidate: Candidate, rules: Rules, *, recomputes: bool) -> Entrant:
    """A config that has not run yet. recomputes: the model can."""
    first = replace(first_trial(candidate, rules.steps), native_optimizer=True)
    name = name_of(candidate.rung.name, candidate.knobs, recomputes=recomputes)
    return Entrant(name=name, candidate=candidate, climb=Climb(rules=rules, first=first))


def _smaller(record: Record, rules: Rules) -> int:
    """The next size to enter with: half, or less than what is over where the peak was measured.

    Not all of a peak grows with the micro batch; about half of it is taken to.
    """
    size, share = record.trial.knobs.micro_batch, 0.5
    if isinstance(record.outcome, Fit):
        over = 1 - rules.usable_bytes / record.outcome.device_peak_bytes
        share = max(0.5, 1 - 2 * over)
    return max((one for one in rules.sizes if one <= min(size - 1, size * share)), default=rules.sizes[0])


def _has_room(forecast: RungForecast, usable_bytes: float) -> bool:
    """Whether the middle of the forecast leaves the headroom on the device, and fits on the other tiers."""
    return all(
        use.limit_bytes is None or use.peak_bytes <= (usable_bytes if tier == "device" else use.limit_bytes)
        for tier, use in forecast.memory.items()
    )
