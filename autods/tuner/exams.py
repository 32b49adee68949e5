"""Exams on the worst batch: how each ended, and which micro batch to examine next."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..types import Failed, Fit, Outcome, OutOfMemory, Phase, Record, Run, Trial, first_line, is_machines_fault
from ..units import format_bytes
from .trials import asked

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


_TAKES_MUCH = 0.8  # of the micro batch that ran out: a bound above it is too weak to go by
_WORTH = 1.125  # times the micro batch that holds; growth by less is not worth an exam
_LONGER = 1.05  # times the elements: less tells nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Device peak of a config on the usual batch by its micro batch: fixed_bytes + bytes_each × micro batch."""

    fixed_bytes: float
    bytes_each: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """What is known of one config. peaks: micro batch → device peak of its trials on the usual batch, bytes.

    longest_ratio: elements of a sample of the longest batch by those of a usual one; 1: not known to differ.
    """

    peaks: Mapping[int, int]
    usable_bytes: float
    limit_bytes: int
    longest_ratio: float = 1.0

    def down(self, shorts: Sequence[Record], sizes: Sequence[int]) -> int | None:
        """The next of `sizes` (ascending) after these records, of which the last and smallest ran short; None when no
        smaller one can help.

        First to where what is known of the longest batch, or of the memory that was lacking, puts it: both are hopeful.
        What ran short then as well is far off, so steps become longer, and `up` finds the way back.
        """
        last = shorts[-1]
        size = last.trial.knobs.micro_batch
        below = [one for one in sizes if one < size]
        if not below or not grows_with_the_batch(last.outcome):
            return None
        target = self._first(last) if len(shorts) == 1 else self._further(shorts)
        return max((one for one in below if one <= target), default=below[0])

    def up(self, exams: Sequence[Record], above: int, sizes: Sequence[int]) -> int | None:
        """A larger one of `sizes` below `above`, which ran short, by the exams that hold; None: not worth another.

        By the line through the two largest of them; through one, and what the usual batch says does not grow.
        """
        peaks = {
            one.trial.knobs.micro_batch: one.outcome.device_peak_bytes for one in exams if isinstance(one.outcome, Fit)
        }
        if not peaks:
            return None
        size = max(peaks)
        line = _line(peaks) or self._from_fixed(size, peaks[size])
        most = (self.usable_bytes - line.fixed_bytes) / max(1.0, line.bytes_each)
        return max((one for one in sizes if size * _WORTH <= one <= most and one < above), default=None)

    def halfway(self, size: int, above: int, sizes: Sequence[int]) -> int | None:
        """Between one that holds and one that ran short although `up` had hoped; None where they lie close."""
        if above < size * _WORTH**2:
            return None
        return max((one for one in sizes if size * _WORTH <= one <= math.sqrt(size * above)), default=None)

    def _first(self, short: Record) -> float:
        size = short.trial.knobs.micro_batch
        if isinstance(short.outcome, Fit) and (exact := [*self._by_the_lack(short)]):
            return exact[0]
        bounds = [*self._by_the_lack(short), *self._by_the_elements()]
        telling = [bound for bound in bounds if bound <= _TAKES_MUCH * size]
        return min(telling) if telling else size / max(2.0, math.sqrt(self.longest_ratio))

    def _by_the_lack(self, short: Record) -> Iterable[float]:
        """As if all that was lacking grew with the batch; of what ran out that is a lower bound."""
        size, needed = short.trial.knobs.micro_batch, _needed(short.outcome, self.limit_bytes)
        if needed is None or needed <= self.usable_bytes:
            return
        line = _line(self.peaks)
        fixed = 0.0 if line is None else min(line.fixed_bytes, self.usable_bytes)
        yield size * (self.usable_bytes - fixed) / (needed - fixed)

    def _by_the_elements(self) -> Iterable[float]:
        """As many elements as the usual batches show that there is room for."""
        if self.longest_ratio < _LONGER or not self.peaks:
            return
        line, most = _line(self.peaks), max(self.peaks)
        if line is None or line.bytes_each <= 0:
            yield most / self.longest_ratio  # as many as were seen to fit
            return
        yield max(1.0, (self.usable_bytes - line.fixed_bytes) / (line.bytes_each * self.longest_ratio))

    def _further(self, shorts: Sequence[Record]) -> float:
        """Where the first guess ran short, too: twice, four times, … less."""
        size = shorts[-1].trial.knobs.micro_batch
        step = 2.0 ** len(shorts)
        if self.longest_ratio >= _LONGER and len(shorts) == 2:
            step = max(2.0, math.sqrt(self.longest_ratio))  # half of what the square would take
        return size / step

    def _from_fixed(self, size: int, peak: int) -> Line:
        usual = _line(self.peaks)
        fixed = 0.0 if usual is None else min(usual.fixed_bytes, peak)
        return Line(fixed_bytes=fixed, bytes_each=(peak - fixed) / size)


def usual_peaks(config: Trial, known: Iterable[Record]) -> Mapping[int, int]:
    """Micro batch → device peak of the trials on the usual batch that say something of this config's memory."""
    return {
        record.trial.knobs.micro_batch: record.outcome.device_peak_bytes
        for record in known
        if isinstance(record.outcome, Fit)
        and (record.trial.rung, record.trial.exam) == (config.rung, None)
        and record.trial.knobs.checkpointing == config.knobs.checkpointing
    }


def _line(peaks: Mapping[int, int]) -> Line | None:
    """Through the largest and one of half its size or less, since the peak bends upwards; None with one point."""
    if len(peaks) < 2:
        return None
    most = max(peaks)
    least = max((size for size in peaks if 2 * size <= most), default=min(peaks))
    bytes_each = max(0.0, (peaks[most] - peaks[least]) / (most - least))
    return Line(fixed_bytes=max(0.0, peaks[most] - bytes_each * most), bytes_each=bytes_each)


def _needed(outcome: Outcome, limit_bytes: int) -> int | None:
    """Device bytes that would have been enough, as far as is known."""
    match outcome:
        case Fit() as fit:
            return fit.device_peak_bytes
        case OutOfMemory(missing_bytes=int(missing)):
            return limit_bytes + missing
        case _:
            return None
