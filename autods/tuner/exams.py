"""Exams of the certificate: run them within their number of trials, judge their memory, and choose the next size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..types import Failed, Fit, Outcome, OutOfMemory, Phase, Record, Run, Trial, first_line, is_machines_fault
from ..units import format_bytes
from .batch_curve import BatchCurve, MemoryLine
from .trials import run_with_retry

# Phases whose device memory grows with the micro batch. That of building, saving and loading does not.
_BATCH_PHASES: tuple[Phase, ...] = ("forward", "backward", "step", "evaluate")
_WORTH_AN_EXAM = 1.125  # ratio of a larger micro batch to one that holds
_LONGER = 1.05  # ratio of elements below which the longest batch counts as a usual one


@dataclass(slots=True)
class Exams:
    """The trials of a certificate: at most `most_trials`; `records` has those that ran, in order."""

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
        """Why no more trials are run, as a clause."""
        allowed = f"all {self.most_trials} trials of the certificate are spent"
        return allowed if self.most_trials > 0 else "no trials were allowed for the certificate"

    def examine(self, trial: Trial) -> Record | None:
        """The trial's record, from an earlier run of it where there is one; None when no trials are left.

        A failure that may be accidental is repeated once.
        """
        known = next((record for earlier, record in self._answers if earlier == trial), None)
        if known is not None or self.left < 1:
            return known
        records = run_with_retry(trial, self._run_counted) if self.left > 1 else (self._run_counted(trial),)
        self._answers.append((trial, records[-1]))
        return records[-1]

    def _run_counted(self, trial: Trial) -> Record:
        self.records.append(self.run(trial))
        return self.records[-1]


def lacks_device_memory(outcome: Outcome, limit_bytes: int) -> bool:
    """Whether memory ran out, the peak exceeds the limit, or the allocator had to flush its cache in the steps."""
    match outcome:
        case Fit() as fit:
            return fit.alloc_retries > 0 or fit.device_peak_bytes > limit_bytes
        case OutOfMemory() as out:
            return not is_machines_fault(out)
        case Failed():
            return False


def grows_with_batch(outcome: Outcome) -> bool:
    """Whether a smaller micro batch can help."""
    match outcome:
        case OutOfMemory(tier="device", phase=phase):
            return phase in _BATCH_PHASES
        case Fit():
            return True
        case _:
            return False


def describe_exam(outcome: Outcome, limit_bytes: int) -> str:
    """The outcome as the end of a sentence: "ran out of device memory in backward"."""
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


def usual_memory_line(config: Trial, records: Iterable[Record]) -> MemoryLine | None:
    """The memory line of a config on the usual batch; None where the records do not show how its peak grows."""
    peaks = BatchCurve.from_records(
        record
        for record in records
        if (record.trial.rung, record.trial.exam) == (config.rung, None)
        and record.trial.knobs.checkpointing == config.knobs.checkpointing
    ).peak_bytes
    if len(peaks) < 2:
        return None
    most = max(peaks)
    least = max((size for size in peaks if 2 * size <= most), default=min(peaks))  # the peak bends upwards
    line = MemoryLine.through(peaks, least, most)
    return replace(line, fixed_bytes=max(0.0, line.fixed_bytes)) if line.bytes_each > 0 else None


def next_micro_batch(
    too_large: Sequence[int],
    holds: Mapping[int, int],
    sizes: Sequence[int],
    *,
    line: MemoryLine | None,
    usable_bytes: float,
    longest_ratio: float = 1.0,
) -> int | None:
    """Return the micro batch to examine next, one of `sizes` (ascending); None when no other one is worth an exam.

    `too_large` are the sizes that ran out of memory on the longest batch, in order; at least one.
    `holds` maps the sizes that did not to their device peak.
    `line` is the memory line on the usual batch.
    `longest_ratio` is the elements of a sample of the longest batch over those of a usual one.

    The first step down scales the line by that ratio; further steps divide by 4, 8, ….
    On the way up, the peak of an exam shows how far to go. When that was too far, the next size halves the ratio.
    """
    above = min(too_large)
    if holds:
        below = max(holds)
        fixed_bytes = 0.0 if line is None else min(line.fixed_bytes, holds[below])
        exam_line = MemoryLine(fixed_bytes=fixed_bytes, bytes_each=(holds[below] - fixed_bytes) / below)
        target = math.sqrt(below * above) if above < too_large[-1] else exam_line.largest(usable_bytes)
        larger = (size for size in sizes if _WORTH_AN_EXAM * below <= size <= target and size < above)
        return max(larger, default=None)
    smaller = [size for size in sizes if size < above]
    if not smaller:
        return None
    target = above / 2 ** len(too_large)
    if len(too_large) == 1 and longest_ratio >= _LONGER:
        target = above / longest_ratio
        if line is not None:
            target = replace(line, bytes_each=line.bytes_each * longest_ratio).largest(usable_bytes)
    return max((size for size in smaller if size <= target), default=smaller[0])
