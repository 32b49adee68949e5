"""Exams on the worst batch: how each ended, and which micro batch to examine next."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..types import Failed, Fit, Outcome, OutOfMemory, Phase, Record, Run, Trial, first_line, is_machines_fault
from ..units import format_bytes
from .trials import run_with_retry

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
        answers = run_with_retry(trial, self._counted) if self.left > 1 else (self._counted(trial),)
        self._answers.append((trial, answers[-1]))
        return answers[-1]

    def _counted(self, trial: Trial) -> Record:
        self.records.append(self.run(trial))
        return self.records[-1]


def lacks_memory_on_device(outcome: Outcome, limit_bytes: int) -> bool:
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
            return f"needs {format_bytes(fit.device_peak_bytes)} of {format_bytes(limit_bytes)}"
        case Fit(alloc_retries=int(retries)) if retries:
            return f"fits, but its allocator ran full {retries} times in the steps"
        case Fit():
            return "fits"
        case OutOfMemory() as out:
            lacking = f", at least {format_bytes(out.missing_bytes)} short" if out.missing_bytes else ""
            return f"ran out of {out.tier} memory in {out.phase}{lacking}"
        case Failed() as failure:
            return f"failed in {failure.phase}: {first_line(failure.evidence)}"


_WORTH = 1.125  # times the micro batch that holds; growth by less is not worth an exam
_LONGER = 1.05  # times the elements: less tells nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """Device peak by micro batch: fixed_bytes + bytes_each × micro batch."""

    fixed_bytes: float
    bytes_each: float

    def largest(self, usable_bytes: float) -> float:
        """The micro batch that fills the usable memory."""
        return (usable_bytes - self.fixed_bytes) / max(1.0, self.bytes_each)


def usual_line(config: Trial, records: Iterable[Record]) -> MemoryLine | None:
    """The memory line of a config on the usual batch; None where the records do not show how its peak grows."""
    peaks = {
        record.trial.knobs.micro_batch: record.outcome.device_peak_bytes
        for record in records
        if isinstance(record.outcome, Fit)
        and (record.trial.rung, record.trial.exam) == (config.rung, None)
        and record.trial.knobs.checkpointing == config.knobs.checkpointing
    }
    if len(peaks) < 2:
        return None
    most = max(peaks)
    least = max((size for size in peaks if 2 * size <= most), default=min(peaks))  # the peak bends upwards
    bytes_each = (peaks[most] - peaks[least]) / (most - least)
    if bytes_each <= 0:
        return None
    return MemoryLine(fixed_bytes=max(0.0, peaks[most] - bytes_each * most), bytes_each=bytes_each)


def next_micro_batch(
    short: Sequence[int],
    held: Mapping[int, int],
    sizes: Sequence[int],
    *,
    line: MemoryLine | None,
    usable_bytes: float,
    longest_ratio: float = 1.0,
) -> int | None:
    """The micro batch to examine next, one of `sizes` (ascending); None where no other one is worth an exam.

    short: those that ran out of memory on the longest batch, in order; there is one at least. held: those that did
    not → device peak. line: of the usual batch. The first step down scales that line by `longest_ratio`, the elements
    of a sample of the longest batch over those of a usual one; further steps down divide by 4, 8, …. Upwards, the
    peak of an exam tells how far; where that was too far, the ratio of what holds and what does not is halved.
    """
    above = min(short)
    if held:
        below = max(held)
        fixed_bytes = 0.0 if line is None else min(line.fixed_bytes, held[below])
        each = MemoryLine(fixed_bytes=fixed_bytes, bytes_each=(held[below] - fixed_bytes) / below)
        target = math.sqrt(below * above) if above < short[-1] else each.largest(usable_bytes)
        return max((size for size in sizes if _WORTH * below <= size <= target and size < above), default=None)
    smaller = [size for size in sizes if size < above]
    if not smaller:
        return None
    target = above / 2 ** len(short)
    if len(short) == 1 and longest_ratio >= _LONGER:
        target = above / longest_ratio
        if line is not None:
            longest = replace(line, bytes_each=line.bytes_each * longest_ratio)
            target = longest.largest(usable_bytes)
    return max((size for size in smaller if size <= target), default=smaller[0])
