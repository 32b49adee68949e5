"""Which micro batch of a config holds on the longest batch: examine, and back off while memory runs short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..outcomes import Failed, Fit
from ..values import Record, Steps, Trial
from .ask import accumulation_for, fits_well, micro_batches, paced, step_s_of
from .backoff import Backoff, usual_peaks
from .exams import Exams, grows_with_the_batch, is_short, what_happened

_LEAST_STEPS = 2  # after the first: states that the optimizer makes lie there from the second on
_WAYS_UP = 2  # exams of larger micro batches than one that holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A config that is not short of memory on the longest batch: its timed trial and its exam."""

    best: Record
    exam: Record


@dataclass(slots=True, kw_only=True)
class Holding:
    """A search under way. known: trials that were run before, the winner first. short: answers that did not hold.

    reserve: how many of the exams' trials what follows will need. longest_ratio: see `Backoff`. backed_off: from what
    to what, and why, as sentences.
    """

    known: tuple[Record, ...]
    exams: Exams
    steps: Steps
    limit_bytes: int
    headroom: float
    world_size: int
    global_batch: int | None
    reserve: int = 0
    longest_ratio: float = 1.0
    backed_off: list[str] = field(default_factory=list)
    short: list[Record] = field(default_factory=list)

    @property
    def usable_bytes(self) -> float:
        return self.limit_bytes * (1 - self.headroom)

    def hold(self, config: Trial) -> Held | None:
        """The config at the largest micro batch that holds, from its own down. None: none does, or trials are spent.

        An exam that fails of something else than memory holds: backing off would not mend it.
        """
        shorts: list[Record] = []
        while (exam := self._examined(config)) is not None:
            answer: Record | None = exam
            if not (short := is_short(exam.outcome, self.limit_bytes)):
                exam = self._roomier(exam, shorts)
                answer = self._timed(self.timing(exam.trial))
            if answer is None:
                return None
            if not short and (answer is self.known[0] or fits_well(answer)):
                return Held(best=answer, exam=exam)
            self.short.append(answer)
            # An exam that held before it was timed puts an end to the search from above.
            shorts = [*shorts, answer] if short else [answer]
            before = answer.trial.knobs.micro_batch
            following = self._backoff(config).down(shorts, self._below(before))
            if following is None:
                return None
            self.backed_off.append(f"{config.rung} from micro batch {before} to {following}: {self.last_said()}")
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
        """Its exam: one that a timed trial went on with, or a trial of its own."""
        if (passed := next((one for one in self.known if _has_examined(one, config)), None)) is not None:
            return passed
        first, knobs = self.known[0], config.knobs
        samples = knobs.micro_batch * knobs.accumulation
        more = samples / (first.trial.knobs.micro_batch * first.trial.knobs.accumulation)
        steps = paced(self.steps, step_s_of(first) * more * self.longest_ratio, least=_LEAST_STEPS)
        return self.exams.ask(replace(config, purpose="certify", exam="worst_case", steps=steps, repeat=0))

    def _timed(self, config: Trial) -> Record | None:
        """Its throughput on the usual batch: by a trial that is known, or by a new one."""
        for record in self.known:
            trial = record.trial
            timed = trial.purpose != "walk" and trial.exam is None and trial.limited and trial.native_optimizer
            same = (trial.rung, trial.knobs) == (config.rung, config.knobs)
            if same and (record is self.known[0] or (timed and fits_well(record))):
                return record
        return self.exams.ask(config)

    def _backoff(self, config: Trial) -> Backoff:
        return Backoff(
            peaks=usual_peaks(config, self.known),
            usable_bytes=self.usable_bytes,
            limit_bytes=self.limit_bytes,
            longest_ratio=self.longest_ratio,
        )

    def _roomier(self, exam: Record, shorts: Sequence[Record]) -> Record:
        """The same at a larger micro batch, where backing off went further down than memory asks for."""
        if not shorts or not isinstance(exam.outcome, Fit):
            return exam
        backoff, above = self._backoff(exam.trial), shorts[-1].trial.knobs.micro_batch
        held = [exam]
        for _ in range(_WAYS_UP):
            size = held[-1].trial.knobs.micro_batch
            larger = self._below(above)
            hopeful = above == shorts[-1].trial.knobs.micro_batch
            following = backoff.up(held, above, larger) if hopeful else backoff.halfway(size, above, larger)
            if following is None or self.exams.left < self.reserve + 2:  # one is kept for the timing
                break
            answer = self._examined(self.timing(exam.trial, following))
            if answer is None or not isinstance(answer.outcome, Fit) or is_short(answer.outcome, self.limit_bytes):
                above = following
                continue
            self.backed_off.append(
                f"{exam.trial.rung} from micro batch {size} up to {following}: {size} left room for it"
            )
            held.append(answer)
        return held[-1]

    def _below(self, size: int) -> Sequence[int]:
        """Smaller micro batches, without those that the model was seen not to train with."""
        seen = ((record.trial, record.outcome) for record in (*self.known, *self.exams.records))
        too_small = (one.knobs.micro_batch for one, end in seen if isinstance(end, Failed) and end.wants_larger_batch)
        least = max(too_small, default=0)
        return [one for one in micro_batches(self.global_batch, self.world_size, size - 1) if one > least]


def _has_examined(record: Record, config: Trial) -> bool:
    """Whether this timed trial of the config ran its exam, too."""
    trial, outcome = record.trial, record.outcome
    usual = trial.exam is None and trial.limited and trial.native_optimizer
    same = (trial.rung, trial.knobs) == (config.rung, config.knobs)
    return usual and same and isinstance(outcome, Fit) and outcome.examined is not None
