"""A config that walk or race tries: its first trials, at the forecast's micro batch and at smaller ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..config.checkpointing import PARTIAL, find_state
from ..events import Note
from ..report.trial_names import config_name
from ..types import Failed, Fit, OutOfMemory, Record, Run, Steps
from .batch_size import LONGER_STEPS, Growth, describe_misfit
from .candidates import Candidate, first_trial
from .certificate import describe_exam
from .forecaster import describe_own_batch, why_impossible
from .prospects import Prospect, find_prospect
from .trials import FitContext, run_with_retry

_WALK_TRIALS, _RACE_TRIALS = 2, 3  # at ever smaller micro batches, before the smallest
_SHARE_WITHOUT_RETRIES = 0.75  # of a micro batch whose allocator ran full
_MOST_FIRST_MICRO_BATCH = 8  # a model that cannot be trained with so many samples lacks something else


@dataclass(slots=True, kw_only=True, eq=False)
class Contestant(Growth):
    """A config that the walk or the race tries.

    `prospect` is what the forecast expects of it. `out` is the reason that it left; None while it is in.
    `entry` are the trials that tried it at the smallest micro batch.
    """

    candidate: Candidate
    prospect: Prospect | None = None
    out: str | None = None
    entry: tuple[Record, ...] = ()

    @property
    def name(self) -> str:
        """The rung, and how the config differs from its usual knobs."""
        recomputes = self.context.facts.checkpointing
        return config_name(self.candidate.rung.name, self.candidate.knobs, recomputes=recomputes)

    @property
    def score(self) -> float:
        """The score of its best trial; 0 where none fitted."""
        best = self.best()
        return 0.0 if best is None else self.context.score(best)

    def is_forecast_faster(self, other: Contestant) -> bool:
        """Whether the forecast expects it to be faster than the other, each at its first micro batch."""
        prospect, others = self.prospect, other.prospect
        return prospect is not None and others is not None and prospect.rate > others.rate

    def forecast_sample_s(self) -> float:
        """Seconds of one more sample by the forecast, at the speed that its largest micro batch had; 0 if unknown."""
        times = self.curve.micro_step_s
        if self.prospect is None or not times:
            return 0.0
        size = max(times)
        step = self.context.forecaster.step_time(self.trial_at(size))
        if step is None:
            return 0.0
        return self.prospect.sample_s * times[size] * self.trial_at(size).knobs.accumulation / step.seconds

    def check_forecast(self, size: int) -> int:
        """The micro batch to enter with: `size`, or the one that should be best if that is larger, within memory.

        Sets `out` where even the smallest cannot fit. Where the middle of the forecast leaves the headroom on the
        device and fits on the other tiers, it is `size`.
        """
        context, smallest = self.context, self.context.sizes[0]
        self.prospect = find_prospect(self.candidate, context)
        if self.prospect is not None:
            size = min(max(size, self.prospect.micro_batch), self.prospect.largest)
        forecast = context.forecast(self.trial_at(size))
        if forecast is None:
            return smallest
        if all(
            use.limit_bytes is None or use.peak_bytes <= (context.usable_bytes if tier == "device" else use.limit_bytes)
            for tier, use in forecast.memory.items()
        ):
            return size
        self.out = why_impossible(context.forecast(self.trial_at(smallest)))
        return smallest if self.out else min(size, self.forecast_limit() or smallest)

    def _choose_first_size(self) -> int:
        """The micro batch of the walk's first trial: the forecast's where step times are known, else the smallest.

        Without a global batch it is one whose step should be short enough to be timed, as in growth.
        """
        context, smallest = self.context, self.context.sizes[0]
        if find_prospect(self.candidate, context) is None:
            return smallest
        size = self.check_forecast(smallest)
        first, last = (context.forecaster.step_time(self.trial_at(each)) for each in (smallest, size))
        if context.settings.global_batch is not None or first is None or last is None or last.seconds <= first.seconds:
            return size
        longest_s = max(self.steps.budget_s, LONGER_STEPS * first.seconds)
        most = smallest + (size - smallest) * (longest_s - first.seconds) / (last.seconds - first.seconds)
        return max(each for each in context.sizes if each <= min(size, most))

    def walk(self, run: Run) -> None:
        """Run the first trials in the walk, where few were forecast too large; `run` tries the smallest."""
        self._enter(self._choose_first_size(), _WALK_TRIALS, run)

    def enter(self, size: int, least: float) -> None:
        """Run the first trials in the race, whose micro batch may be another rung's, and grow once.

        Sets `out` where one that lacks the headroom scores less than `least`: smaller micro batches are no faster.
        """
        self._enter(size, _RACE_TRIALS, self.context.run, least)
        if self.out is None and not self.records:
            self.try_next()

    def _enter(self, size: int, trials: int, run: Run, least: float = 0.0) -> None:
        """Try `size`, then smaller micro batches, up to so many `trials`, at last the smallest by `run`.

        Sets `out` where none fits. A failure that is not for lack of device memory is tried at the smallest next, which
        shows whether the size caused it. It causes neither a broken op nor a hang of the user's code.
        """
        context, most_trials = self.context, self.most_trials
        for _ in range(trials):
            if size <= context.sizes[0]:
                break
            record = self.measure(size)
            if context.fits(record):
                return
            self.most_trials = most_trials + len(self.records)  # growth does not pay for a size that was too large
            # Half the size, or less where the peak was measured: about half of a peak grows with the micro batch.
            match record.outcome:
                case Fit(alloc_retries=0) if context.score(record) < least:
                    self.out = f"micro batch {size} does not leave the headroom, and is too slow"
                    return
                case Fit(alloc_retries=retries) if retries:  # its peak is what it has after giving memory back
                    share = _SHARE_WITHOUT_RETRIES
                case Fit(device_peak_bytes=peak_bytes):
                    share = max(0.5, 2 * context.usable_bytes / peak_bytes - 1)
                case OutOfMemory(tier="device"):
                    share = 0.5
                case Failed(op=str()) | Failed(hung_at=str()):
                    self.out = describe_exam(record.outcome)
                    return
                case _:
                    break
            smaller = (other for other in context.sizes if other <= min(size - 1, size * share))
            size = max(smaller, default=context.sizes[0])
        self.entry = try_rung(self.candidate, context, run)
        last = self.entry[-1]
        failures = (record.outcome for record in self.entry if isinstance(record.outcome, Failed))
        shown = next((failed.own_batch for failed in failures if failed.own_batch is not None), None)
        self.context = replace(
            context, least_micro_batch=last.trial.knobs.micro_batch, own_batch=shown or context.own_batch
        )
        # The smallest micro batch of a rung need not leave the headroom. One that recomputes more layers is smaller.
        is_partial = find_state(self.candidate.knobs) in PARTIAL
        if not isinstance(last.outcome, Fit) or (is_partial and not context.fits(last)):
            self.out = describe_misfit(last.outcome, context.usable_bytes)
            return
        if last.trial.knobs.settings != self.candidate.knobs.settings:  # unpinned: earlier trials ran another config
            self.entry, self.records = (*self.records, *self.entry), []
            knobs = replace(self.candidate.knobs, settings=last.trial.knobs.settings)
            self.candidate = replace(self.candidate, knobs=knobs, pinned=())
        self.first, self.walked = last.trial, last


def make_contestant(candidate: Candidate, context: FitContext, most_trials: int, steps: Steps) -> Contestant:
    """A contestant without trials; its growth takes up to `most_trials` of these `steps`."""
    first = first_trial(candidate, steps, context.sizes[0])
    return Contestant(candidate=candidate, context=context, first=first, most_trials=most_trials, steps=steps)


def try_rung(candidate: Candidate, context: FitContext, run: Run) -> tuple[Record, ...]:
    """Run a rung's first trial at the smallest micro batch; the last record returned has the verdict.

    Where pinned memory runs out, a second trial leaves it unpinned. Where the model cannot be trained with so small a
    micro batch, the next trial takes the next one that is at least twice as large. Where a script has a micro batch of
    its own, the next trial takes that one.
    """
    first = first_trial(candidate, context.settings.profile.walk, context.sizes[0])
    records = run_with_retry(first, run)
    match records[-1].outcome:
        case OutOfMemory(tier="pinned") if candidate.pinned:
            unpinned = {**candidate.knobs.settings, **dict.fromkeys(candidate.pinned, False)}
            pageable = replace(first, knobs=replace(first.knobs, settings=unpinned))
            return records + run_with_retry(pageable, run)
        case Failed(own_batch=int(own)) if own != first.knobs.micro_batch:
            context.memory.listen(Note(text=describe_own_batch(own)))
            return records + try_rung(candidate, replace(context, own_batch=own), run)
        case Failed(wants_larger_batch=True) if (
            context.fixed_batch is None and first.knobs.micro_batch < _MOST_FIRST_MICRO_BATCH
        ):
            larger = replace(context, least_micro_batch=2 * first.knobs.micro_batch)
            return records + (try_rung(candidate, larger, run) if larger.sizes else ())
        case _:
            return records
