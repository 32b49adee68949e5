"""What certifying asks of a runner: each exam once, few in all; and what an exam that ran short asks for next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..outcomes import Failed, Fit, Outcome, OutOfMemory, Phase, is_machines_fault
from ..units import show_bytes
from ..values import Record, Run, Trial
from .ask import asked
from .certificate import first_line

# Where a rank's device memory grows with the micro batch. What building, saving and loading need does not.
_WITH_THE_BATCH: tuple[Phase, ...] = ("forward", "backward", "step", "evaluate")
_TAKES_MUCH = 0.8  # of the micro batch that ran out
_WORTH = 1.125  # times the micro batch that holds; growth by less is not worth an exam


@dataclass(slots=True)
class Exams:
    """Trials under way: `records` lists all that were run, in order."""

    run: Run
    most_trials: int
    records: list[Record] = field(default_factory=list)
    _answers: list[tuple[Trial, Record]] = field(default_factory=list)

    @property
    def left(self) -> int:
        """How many trials may still be run."""
        return self.most_trials - len(self.records)

    @property
    def spent(self) -> str:
        """Why nothing more is asked, as part of a sentence."""
        granted = f"all {self.most_trials} trials of the certificate are spent"
        return granted if self.most_trials > 0 else "no trials were granted for the certificate"

    def ask(self, trial: Trial) -> Record | None:
        """The answer, a fluke asked once more; one that is known is not run again. None: the trials are spent."""
        known = next((answer for question, answer in self._answers if question == trial), None)
        if known is not None or self.left < 1:
            return known
        answers = asked(trial, self._counted) if self.left > 1 else (self._counted(trial),)
        self._answers.append((trial, answers[-1]))
        return answers[-1]

    def _counted(self, trial: Trial) -> Record:
        self.records.append(self.run(trial))
        return self.records[-1]


def is_short(outcome: Outcome, limit_bytes: int) -> bool:
    """Whether memory is what failed: it ran out, was beyond the limit, or the allocator had to flush in the steps."""
    match outcome:
        case Fit() as fit:
            return fit.alloc_retries > 0 or fit.device_peak_bytes > limit_bytes
        case OutOfMemory() as out:
            return not is_machines_fault(out)
        case Failed():
            return False


def grows_with_the_batch(outcome: Outcome) -> bool:
    """Whether a smaller micro batch can help."""
    match outcome:
        case OutOfMemory(tier="device", phase=phase):
            return phase in _WITH_THE_BATCH
        case Fit():
            return True
        case _:
            return False


def what_happened(outcome: Outcome, limit_bytes: int) -> str:
    """'ran out of device memory in backward', as part of a sentence."""
    match outcome:
        case Fit() as fit if fit.device_peak_bytes > limit_bytes:
            return f"needs {show_bytes(fit.device_peak_bytes)} of {show_bytes(limit_bytes)}"
        case Fit(alloc_retries=int(retries)) if retries:
            return f"fits, but its allocator ran full {retries} times in the steps"
        case Fit():
            return "fits"
        case OutOfMemory() as out:
            lacking = f", at least {show_bytes(out.missing_bytes)} short" if out.missing_bytes else ""
            return f"ran out of {out.tier} memory in {out.phase}{lacking}"
        case Failed() as failure:
            return f"failed in {failure.phase}: {first_line(failure.evidence)}"


def smaller(
    short: Record, sizes: Sequence[int], known: Iterable[Record], *, usable_bytes: float, limit_bytes: int, again: bool
) -> int | None:
    """The next micro batch to examine, one of `sizes` (ascending), or None when no smaller one can help.

    By what is known of the memory that was lacking: as if all of it grew with the batch but what does not by the line
    through the config's `known` trials. Both are hopeful, and what ran out is a lower bound: where that takes little
    away, or did not help (`again`), it is half.
    """
    size = short.trial.knobs.micro_batch
    below = [one for one in sizes if one < size]
    if not below or not grows_with_the_batch(short.outcome):
        return None
    target = size / 2
    needed = _needed(short.outcome, limit_bytes)
    if not again and needed is not None and needed > usable_bytes:
        fixed = min(_fixed_bytes(short.trial, known), usable_bytes)
        by_line = size * (usable_bytes - fixed) / (needed - fixed)
        if isinstance(short.outcome, Fit) or by_line <= _TAKES_MUCH * size:
            target = by_line
    return max((one for one in below if one <= target), default=below[0])


def roomier(exam: Record, sizes: Sequence[int], *, usable_bytes: float) -> int | None:
    """A larger one of `sizes` that must fit, too, as if all of the exam's peak grew with the batch; None: no such."""
    if not isinstance(exam.outcome, Fit):
        return None
    size = exam.trial.knobs.micro_batch
    most = size * usable_bytes / max(1, exam.outcome.device_peak_bytes)
    return max((one for one in sizes if size * _WORTH <= one <= most), default=None)


def _needed(outcome: Outcome, limit_bytes: int) -> int | None:
    """Device bytes that would have been enough, as far as is known."""
    match outcome:
        case Fit() as fit:
            return fit.device_peak_bytes
        case OutOfMemory(missing_bytes=int(missing)):
            return limit_bytes + missing
        case _:
            return None


def _fixed_bytes(trial: Trial, known: Iterable[Record]) -> float:
    """What does not grow with the micro batch, by the line through the smallest and the largest that fitted; else 0."""
    peaks = {
        record.trial.knobs.micro_batch: record.outcome.device_peak_bytes
        for record in known
        if isinstance(record.outcome, Fit)
        and (record.trial.rung, record.trial.exam) == (trial.rung, None)
        and record.trial.knobs.checkpointing == trial.knobs.checkpointing
    }
    if len(peaks) < 2:
        return 0.0
    least, most = min(peaks), max(peaks)
    bytes_each = (peaks[most] - peaks[least]) / (most - least)
    return min(max(0.0, peaks[least] - bytes_each * least), peaks[least])
