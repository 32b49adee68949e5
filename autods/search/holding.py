"""Which micro batch of a config holds on the longest batch: examine, and back off while memory runs short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..outcomes import Fit
from ..values import Record, Steps, Trial
from .ask import accumulation_for, fits_well, micro_batches
from .exams import Exams, grows_with_the_batch, is_short, roomier, smaller, what_happened


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A config that is not short of memory on the longest batch: its timed trial and its exam."""

    best: Record
    exam: Record


@dataclass(slots=True, kw_only=True)
class Holding:
    """A search under way. known: trials that were run before, the winner first. short: answers that did not hold.

    backed_off: from what to what, and why, as sentences.
    """

    known: tuple[Record, ...]
    exams: Exams
    steps: Steps
    limit_bytes: int
    headroom: float
    world_size: int
    global_batch: int | None
    backed_off: list[str] = field(default_factory=list)
    short: list[Record] = field(default_factory=list)

    @property
    def usable_bytes(self) -> float:
        return self.limit_bytes * (1 - self.headroom)

    def hold(self, config: Trial) -> Held | None:
        """The config at the largest micro batch that holds, from its own down. None: none does, or trials are spent.

        An exam that fails of something else than memory holds: backing off would not mend it.
        """
        above: int | None = None  # the smallest micro batch that ran short
        while (exam := self._examined(config)) is not None:
            answer: Record | None = exam
            if not is_short(exam.outcome, self.limit_bytes):
                exam = self._roomier(exam, above)
                answer = self._timed(self.timing(exam.trial))
            if answer is None:
                return None
            if answer is not exam and (answer is self.known[0] or fits_well(answer)):
                return Held(best=answer, exam=exam)
            self.short.append(answer)
            following = self._smaller(answer, again=above is not None)
            if following is None:
                return None
            above = answer.trial.knobs.micro_batch
            self.backed_off.append(f"{config.rung} from micro batch {above} to {following}: {self.last_said()}")
            config = self.timing(config, following)
        return None

    def timing(self, config: Trial, micro_batch: int | None = None) -> Trial:
        """The trial that measures this config as the winner was measured, with the global batch kept."""
        size = config.knobs.micro_batch if micro_batch is None else micro_batch
        accumulation = config.knobs.accumulation
        if self.global_batch is not None:
            accumulation = accumulation_for(self.global_batch, size, self.world_size)
        knobs = replace(config.knobs, micro_batch=size, accumulation=accumulation)
        return replace(config, knobs=knobs, purpose="verify", steps=self.known[0].trial.steps, exam=None, repeat=0)

    def rules_out(self, config: Trial) -> bool:
        """Whether one that ran short needed no more than this: its rung, at a batch as small, recomputing if it did."""
        return any(
            one.trial.rung == config.rung
            and (one.trial.knobs.micro_batch <= config.knobs.micro_batch or not grows_with_the_batch(one.outcome))
            and (one.trial.knobs.checkpointing or not config.knobs.checkpointing)
            for one in self.short
        )

    def last_said(self) -> str:
        """Why the last one that did not hold does not, as part of a sentence."""
        last = self.short[-1]
        on = "the longest batch" if last.trial.exam == "worst_case" else "the usual batch"
        size = last.trial.knobs.micro_batch
        return f"on {on}, micro batch {size} {what_happened(last.outcome, self.limit_bytes)}"

    def _examined(self, config: Trial) -> Record | None:
        return self.exams.ask(replace(config, purpose="certify", exam="worst_case", steps=self.steps, repeat=0))

    def _timed(self, config: Trial) -> Record | None:
        """Its throughput on the usual batch: by a trial that is known, or by a new one."""
        for record in self.known:
            same = replace(config, purpose=record.trial.purpose, repeat=record.trial.repeat)
            if record.trial == same and (record is self.known[0] or fits_well(record)):
                return record
        return self.exams.ask(config)

    def _smaller(self, short: Record, *, again: bool) -> int | None:
        sizes = self._below(short.trial.knobs.micro_batch)
        known, usable, limit = self.known, self.usable_bytes, self.limit_bytes
        return smaller(short, sizes, known, usable_bytes=usable, limit_bytes=limit, again=again)

    def _roomier(self, exam: Record, above: int | None) -> Record:
        """The same below the one that ran short, where halving went further down than memory asks for."""
        size = None if above is None else roomier(exam, self._below(above), usable_bytes=self.usable_bytes)
        if size is None or self.exams.left < 2:  # one is kept for the timing
            return exam
        larger = self._examined(self.timing(exam.trial, size))
        if larger is None or not isinstance(larger.outcome, Fit) or is_short(larger.outcome, self.limit_bytes):
            return exam
        before = exam.trial.knobs.micro_batch
        self.backed_off.append(f"{exam.trial.rung} from micro batch {before} up to {size}: {before} left room for it")
        return larger

    def _below(self, size: int) -> Sequence[int]:
        return micro_batches(self.global_batch, self.world_size, size - 1)
