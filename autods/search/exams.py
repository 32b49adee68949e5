"""What certifying asks of a runner: each exam once, few in all; and what an answer says of memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..outcomes import Failed, Fit, Outcome, OutOfMemory, Phase, first_line, is_machines_fault
from ..units import show_bytes
from ..values import Record, Run, Trial
from .ask import asked

# Where a rank's device memory grows with the micro batch. What building, saving and loading need does not.
_WITH_THE_BATCH: tuple[Phase, ...] = ("forward", "backward", "step", "evaluate")


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
