"""Certify the winner on the worst batch, and back off where it does not hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from ..config.base_config import precision_name
from ..types import Failed, Fit, Record, Run, Steps, Trial, failed_after_the_steps
from .candidates import Candidate
from .certificate import Certificate, certificate_of_exam, with_verdict
from .context import FitContext
from .exams import Exams, grows_with_the_batch, lacks_memory_on_device, next_micro_batch, usual_line, what_happened
from .ladder_walk import try_rung
from .loss_parity import ParityResult, compare_losses, is_same_maths
from .optuna_search import TuneResult
from .race import RaceResult
from .trials import accumulation_for, fit_steps_to_budget, fits_well, fits_within, median_step_s, micro_batches

_WAYS_UP = 2  # exams of larger micro batches than one that holds
_LEAST_STEPS = 2  # after the first: states that the optimizer makes lie there from the second on


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenConfig:
    """A config that is not short of memory on the longest batch: its timed trial and its exam."""

    best: Record
    exam: Record


@dataclass(slots=True, kw_only=True)
class ExamSearch:
    """A search under way. known: trials that were run before, the winner first. short: answers that did not hold.

    reserve: how many of the exams' trials what follows will need. longest_ratio: see `next_micro_batch`. backed_off:
    from what to what, and why, as sentences.
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

    def hold(self, config: Trial) -> ProvenConfig | None:
        """The config at the largest micro batch that holds, from its own down. None: none does, or trials are spent.

        An exam that fails of something else than memory holds: backing off would not hint it.
        """
        shorts: list[int] = []
        while (exam := self._examined(config)) is not None:
            size = exam.trial.knobs.micro_batch
            answer: Record | None = exam
            if not (short := lacks_memory_on_device(exam.outcome, self.limit_bytes)):
                exam = self._larger(exam, shorts)
                size = exam.trial.knobs.micro_batch
                answer = self._timed(self.timing(exam.trial))
            if answer is None:
                return None
            if not short and (answer is self.known[0] or fits_well(answer)):
                return ProvenConfig(best=answer, exam=exam)
            self.short.append(answer)
            # An exam that held before its timing ran short puts an end to the search from above.
            shorts = [*shorts, size] if short else [size]
            following = None
            if grows_with_the_batch(answer.outcome):
                following = self._next(config, shorts, {}, self._below(size))
            if following is None:
                return None
            self.backed_off.append(f"{config.rung} from micro batch {size} to {following}: {self.last_said()}")
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
        """Its exam, a trial of its own."""
        first, knobs = self.known[0], config.knobs
        samples = knobs.micro_batch * knobs.accumulation
        more = samples / (first.trial.knobs.micro_batch * first.trial.knobs.accumulation)
        steps = fit_steps_to_budget(self.steps, median_step_s(first) * more * self.longest_ratio, least=_LEAST_STEPS)
        return self.exams.ask(replace(config, purpose="certify", exam="worst_case", steps=steps, repeat=0))

    def _timed(self, config: Trial) -> Record | None:
        """Its throughput on the usual batch: by a trial that is known, or by a new one."""
        for record in self.known:
            trial = record.trial
            timed = trial.purpose != "walk" and trial.exam is None and trial.limited
            same = (trial.rung, trial.knobs) == (config.rung, config.knobs)
            if same and (record is self.known[0] or (timed and fits_well(record))):
                return record
        return self.exams.ask(config)

    def _larger(self, exam: Record, shorts: Sequence[int]) -> Record:
        """The exam of a larger micro batch that holds, below the last that ran short; else this one."""
        if not shorts or not isinstance(exam.outcome, Fit):
            return exam
        best, above = exam, list(shorts)
        held = {exam.trial.knobs.micro_batch: exam.outcome.device_peak_bytes}
        for _ in range(_WAYS_UP):
            size = max(held)
            following = self._next(exam.trial, above, held, self._below(min(above)))
            if following is None or self.exams.left < self.reserve + 2:  # one is kept for the timing
                break
            answer = self._examined(self.timing(exam.trial, following))
            if (
                answer is None
                or not isinstance(answer.outcome, Fit)
                or lacks_memory_on_device(answer.outcome, self.limit_bytes)
            ):
                above.insert(0, following)
                continue
            self.backed_off.append(f"{exam.trial.rung} from micro batch {size} up to {following}: it holds, too")
            held[following] = answer.outcome.device_peak_bytes
            best = answer
        return best

    def _next(self, config: Trial, short: Sequence[int], held: Mapping[int, int], sizes: Sequence[int]) -> int | None:
        return next_micro_batch(
            short, held, sizes,
            line=usual_line(config, self.known), usable_bytes=self.usable_bytes, longest_ratio=self.longest_ratio,
        )  # fmt: skip

    def _below(self, size: int) -> Sequence[int]:
        """Smaller micro batches, without those that the model was seen not to train with."""
        seen = [(one.trial.knobs.micro_batch, one.outcome) for one in (*self.known, *self.exams.records)]
        fits = min((size for size, outcome in seen if isinstance(outcome, Fit)), default=size)
        too_small = (size for size, outcome in seen if isinstance(outcome, Failed) and outcome.wants_larger_batch)
        least = max((one for one in too_small if one < fits), default=0)  # of others the size is wrong otherwise
        return [one for one in micro_batches(self.global_batch, self.world_size, size - 1) if one > least]


_LEAST_COMPARED = 4  # steps; what changes the maths adds up
_COMPARISON = 2  # trials: the config and the reference


@dataclass(frozen=True, slots=True, kw_only=True)
class CertifyResult:
    """What certifying found.

    best: a timed trial of the config to take. records: all trials that were run for it, in order. reason: a sentence.
    """

    best: Record
    certificate: Certificate
    records: tuple[Record, ...]
    reason: str


def certify(
    winner: Record,
    run: Run,
    *,
    alternates: Sequence[Record],
    reference: Record | None,
    steps: Steps,
    parity_steps: Steps,
    tolerance: float,
    limit_bytes: int,
    headroom: float,
    world_size: int,
    global_batch: int | None,
    most_trials: int,
    leaner: Iterable[Record] = (),
    alike: bool = False,
    longest_ratio: float = 1.0,
    seen: Sequence[Record] = (),
) -> CertifyResult:
    """Prove the winner, or what has to be taken instead, in at most `most_trials` trials.

    Where memory runs short on the longest batch, the micro batch shrinks; where none holds, the next of `alternates`
    (other configs that fitted, best first) is examined. reference: a plain config known to fit, whose losses the
    winner has to match within `tolerance`, relatively; a knob that changes them is taken back. None: not compared.
    alike: losses are compared at one micro batch, as a script needs it.
    leaner: fits of rungs further down, drawn one by one when none of `alternates` holds: what they cost to find is not
    counted here. longest_ratio: elements of a sample of the longest batch by those of a usual one; 1: unknown.
    seen: all trials of the fit; they say how memory grows, and stand for timings.
    """
    search = ExamSearch(
        known=(winner, *alternates, *(() if reference is None else (reference,)), *seen),
        exams=Exams(run=run, most_trials=most_trials),
        steps=steps,
        limit_bytes=limit_bytes,
        headroom=headroom,
        world_size=world_size,
        global_batch=global_batch,
        reserve=0 if reference is None or is_same_maths(winner.trial, reference.trial) else _COMPARISON,
        longest_ratio=longest_ratio,
    )
    parting: tuple[ProvenConfig, ParityResult, tuple[str, ...]] | None = (
        None  # holds, but its losses are not the reference's
    )
    for config in _configs(winner, chain(alternates, leaner), search):
        if (held := search.hold(config)) is None:
            continue
        said = (
            ParityResult() if reference is None else _compared(held, reference, search, parity_steps, tolerance, alike)
        )
        backed_off = tuple(search.backed_off)
        if said.taken_back is None:
            return _certified(held, said, search, backed_off)
        search.backed_off.append(said.changed)
        if (without := search.hold(search.timing(said.taken_back))) is not None:
            return _certified(without, ParityResult(parity=said.without), search, tuple(search.backed_off))
        unproven = replace(said, failure=f"{said.failure}; without it, the config was not seen to hold")
        parting = parting or (held, unproven, backed_off)
    if parting is not None:
        held, said, backed_off = parting
        return _certified(held, said, search, backed_off)
    return _none_holds(winner, search)


def _configs(winner: Record, others: Iterator[Record], search: ExamSearch) -> Iterator[Trial]:
    """The winner, then what may hold although all before did not."""
    yield winner.trial
    before = winner.trial
    while search.exams.left > 0 and (record := next(others, None)) is not None:
        config = search.timing(record.trial)
        usual = record.trial.limited and record.trial.exam is None
        if usual and fits_well(record) and not search.rules_out(config):
            search.backed_off.append(f"from {_name(before)} to {_name(config)}: {search.last_said()}")
            yield config
            before = config


def _compared(
    held: ProvenConfig, reference: Record, search: ExamSearch, steps: Steps, tolerance: float, alike: bool
) -> ParityResult:
    return compare_losses(
        held.best.trial,
        reference,
        search.exams,
        steps=fit_steps_to_budget(steps, median_step_s(held.best), least=_LEAST_COMPARED),
        tolerance=tolerance,
        limit_bytes=search.limit_bytes,
        alike=alike,
    )


def _certified(
    held: ProvenConfig, said: ParityResult, search: ExamSearch, backed_off: tuple[str, ...]
) -> CertifyResult:
    exam = certificate_of_exam(held.exam, limit_bytes=search.limit_bytes, usable_bytes=search.usable_bytes)
    certificate = with_verdict(
        replace(
            exam,
            parity=said.parity,
            backed_off=backed_off,
            failures=exam.failures + _present(said.failure),
            not_checked=exam.not_checked + _present(said.not_checked),
        )
    )
    return _with_reason(held.best, certificate, search)


def _none_holds(winner: Record, search: ExamSearch) -> CertifyResult:
    """The winner as it was found, and why nothing is proven of it."""
    rung = search.short[-1].trial.rung if search.short else ""
    failure = f"no config was found that holds: {rung}, {search.last_said()}" if rung else None
    spent = f"no config was proven: {search.exams.spent}" if search.exams.left < 1 else None
    certificate = Certificate(
        passed=False,
        backed_off=tuple(search.backed_off),
        failures=_present(failure),
        not_checked=_present(spent),
    )
    return _with_reason(winner, certificate, search)


def _with_reason(best: Record, certificate: Certificate, search: ExamSearch) -> CertifyResult:
    first = search.known[0].trial
    proven = f"{_name(best.trial)} holds on the longest batch, in evaluation, and when a checkpoint is saved and loaded"
    instead = ""
    if certificate.backed_off and best is not search.known[0]:
        same = _name(best.trial) == _name(first)
        instead = f"; {certificate.backed_off[-1]}" if same else f"; taken instead of {_name(first)}"
    wrong = "; ".join((*certificate.failures, *certificate.not_checked))
    reason = (proven if certificate.passed else wrong) + instead
    return CertifyResult(best=best, certificate=certificate, records=tuple(search.exams.records), reason=reason)


def _name(config: Trial) -> str:
    recomputing = ", recomputing" if config.knobs.checkpointing else ""
    return f"{config.rung} (micro batch {config.knobs.micro_batch}{recomputing})"


def _present(sentence: str | None) -> tuple[str, ...]:
    return () if sentence is None else (sentence,)


# Losses of two configs that compute the same differ by rounding alone. Measured on CPU ranks, over rungs, cuts of the
# batch, buckets and checkpointing: up to 3e-7 in fp32, 5e-3 in bf16. A learning rate that is a tenth higher: 6e-3.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}


def certify_winner(
    tuned: TuneResult, raced: RaceResult, reference: Record, untried: Sequence[Candidate], context: FitContext
) -> CertifyResult | None:
    """reference: the walk's winner. untried: rungs that may hold where nothing that is known does. None: not wanted."""
    settings, limits = context.settings, context.settings.profile.certify
    if limits.most_trials < 1:
        return None
    return certify(
        tuned.best,
        lambda trial: _examined(trial, context),
        alternates=(raced.best, *raced.others),
        reference=_largest(reference, context) if limits.parity is not None else None,
        steps=limits.steps,
        parity_steps=limits.parity or limits.steps,
        tolerance=max(TOLERANCE[one] for one in (precision_name(settings.base), *settings.precisions)),
        limit_bytes=settings.device_bytes,
        headroom=settings.profile.headroom,
        world_size=context.world_size,
        global_batch=settings.global_batch,
        most_trials=limits.most_trials,
        longest_ratio=context.facts.longest_ratio,
        seen=tuple(context.memory.records),
        leaner=_leaner(untried if settings.profile.race.stop == "first-fit" else (), context),
        alike=settings.source.kind == "script",
    )


def _largest(plain: Record, context: FitContext) -> Record:
    """The same config at the largest micro batch that is known to fit: it trains on the winner's samples, and at micro
    batch 1 that would take many times as long."""

    def cut(record: Record) -> Trial:
        knobs = replace(record.trial.knobs, micro_batch=1, accumulation=1)
        usual = replace(record.trial, purpose="walk", steps=plain.trial.steps, repeat=0)
        return replace(usual, knobs=knobs)

    alike = [one for one in context.memory.records if cut(one) == cut(plain) and fits_within(one, context.usable_bytes)]
    return max([plain, *alike], key=lambda one: one.trial.knobs.micro_batch)


def _examined(trial: Trial, context: FitContext) -> Record:
    """A trial of the certificate: a disk too full for a checkpoint is said there, and ends no fit."""
    record = context.memory.run(trial)
    if failed_after_the_steps(record.outcome):
        return record
    return context.check(record)


def _leaner(untried: Sequence[Candidate], context: FitContext) -> Iterator[Record]:
    """Rungs that nobody tried yet, one at a time, as far as they fit."""
    for candidate in untried:
        last = try_rung(candidate, context.run, context.settings.profile.walk)[-1]
        if isinstance(last.outcome, Fit):
            yield last
