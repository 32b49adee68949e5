"""Certify the winner on the longest batch, and back off where it does not hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from ..config.base_config import precision_name
from ..types import Failed, Fit, Record, Run, Steps, Trial
from .candidates import Candidate
from .certificate import Certificate, certificate_of_exam, with_verdict
from .context import FitContext
from .exams import Exams, describe_exam, grows_with_batch, lacks_device_memory, next_micro_batch, usual_memory_line
from .ladder_walk import try_rung
from .loss_parity import ParityResult, compare_losses, is_same_maths
from .optuna_search import TuneResult
from .race import RaceResult
from .trials import accumulation_for, fit_steps_to_budget, fits_well, fits_within, median_step_s, micro_batches

# Losses of two configs that compute the same differ by rounding alone. Measured on CPU ranks, over rungs, cuts of the
# batch, buckets and checkpointing: up to 3e-7 in fp32, 5e-3 in bf16. A learning rate that is a tenth higher: 6e-3.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}
_TRIALS_UPWARDS = 2  # exams of larger micro batches than one that holds
_FEWEST_EXAM_STEPS = 2  # after the first: the optimizer's states exist from the second step on
_FEWEST_COMPARED_STEPS = 4  # differences add up from step to step
_COMPARISON_TRIALS = 2  # the config and the reference


@dataclass(frozen=True, slots=True, kw_only=True)
class CertifyResult:
    """The config to take as a timed trial, its certificate, all trials of the exams, and the reason."""

    best: Record
    certificate: Certificate
    records: tuple[Record, ...]
    reason: str


def certify_winner(
    tuned: TuneResult, raced: RaceResult, reference: Record, untried: Sequence[Candidate], context: FitContext
) -> CertifyResult | None:
    """Certify the fit's winner; None when the profile wants no certificate.

    `reference` is the walk's winner.
    `untried` are rungs to try when no known config holds.
    """
    settings, limits = context.settings, context.settings.profile.certify
    if limits.most_trials < 1:
        return None
    return certify(
        tuned.best,
        lambda trial: _run_exam(trial, context),
        alternates=(raced.best, *raced.others),
        reference=_largest_reference(reference, context) if limits.parity is not None else None,
        steps=limits.steps,
        parity_steps=limits.parity or limits.steps,
        tolerance=max(TOLERANCE[name] for name in (precision_name(settings.base), *settings.precisions)),
        limit_bytes=settings.device_bytes,
        headroom=settings.profile.memory.headroom,
        world_size=context.world_size,
        global_batch=settings.global_batch,
        most_trials=limits.most_trials,
        longest_ratio=context.facts.longest_ratio,
        seen=tuple(context.memory.records),
        leaner=_try_leaner_rungs(untried if settings.profile.race.stop == "first-fit" else (), context),
        alike=settings.source.kind == "script",
    )


def _run_exam(trial: Trial, context: FitContext) -> Record:
    """Run a trial of the certificate. A failure after the steps (a disk too full for a checkpoint) ends no fit."""
    record = context.memory.run(trial)
    ran_its_steps = record.outcome.kind != "fit" and record.outcome.phase in ("evaluate", "save", "load")
    return record if ran_its_steps else context.check(record)


def _largest_reference(reference: Record, context: FitContext) -> Record:
    """The reference at the largest micro batch known to fit: at micro batch 1 the winner's samples take far longer."""

    def config(record: Record) -> Trial:
        knobs = replace(record.trial.knobs, micro_batch=1, accumulation=1)
        return replace(record.trial, knobs=knobs, purpose="walk", steps=reference.trial.steps, repeat=0)

    same = [
        record
        for record in context.memory.records
        if config(record) == config(reference) and fits_within(record, context.usable_bytes)
    ]
    return max([reference, *same], key=lambda record: record.trial.knobs.micro_batch)


def _try_leaner_rungs(untried: Sequence[Candidate], context: FitContext) -> Iterator[Record]:
    """Try rungs one at a time, and yield those that fit."""
    for candidate in untried:
        last = try_rung(candidate, context.run, context.settings.profile.walk)[-1]
        if isinstance(last.outcome, Fit):
            yield last


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
    """Prove the winner, or the config to take instead, in at most `most_trials` trials.

    The micro batch shrinks when the longest batch lacks memory. When no micro batch holds, another config is examined:
    the next of `alternates` (configs that fitted, best first), then of `leaner`.

    `leaner` yields fits of rungs further down; the trials that find them do not count here.
    `reference` is a plain config known to fit; None: losses are not compared.
    The winner's losses have to match it within the relative `tolerance`. A knob that changes them is reverted.
    `alike` trains both at one micro batch, as a script needs it.
    `longest_ratio` is the elements of a sample of the longest batch over those of a usual one; 1 when unknown.
    `seen` has all trials of the fit. They show how memory grows, and their timings are not repeated.
    """
    search = ExamSearch(
        known=(winner, *alternates, *(() if reference is None else (reference,)), *seen),
        exams=Exams(run=run, most_trials=most_trials),
        steps=steps,
        limit_bytes=limit_bytes,
        headroom=headroom,
        world_size=world_size,
        global_batch=global_batch,
        reserve=0 if reference is None or is_same_maths(winner.trial, reference.trial) else _COMPARISON_TRIALS,
        longest_ratio=longest_ratio,
    )
    differing: tuple[ProvenConfig, ParityResult, tuple[str, ...]] | None = None  # holds, but its losses differ
    for config in _configs(winner, chain(alternates, leaner), search):
        if (proven := search.prove(config)) is None:
            continue
        parity = ParityResult()
        if reference is not None:
            parity = compare_losses(
                proven.best.trial,
                reference,
                search.exams,
                steps=fit_steps_to_budget(parity_steps, median_step_s(proven.best), least=_FEWEST_COMPARED_STEPS),
                tolerance=tolerance,
                limit_bytes=limit_bytes,
                alike=alike,
            )
        backed_off = tuple(search.backed_off)
        if parity.taken_back is None:
            return _certified(proven, parity, search, backed_off)
        search.backed_off.append(parity.changed)
        if (without := search.prove(search.timed_trial(parity.taken_back))) is not None:
            return _certified(without, ParityResult(parity=parity.without), search, tuple(search.backed_off))
        unproven = replace(parity, failure=f"{parity.failure}; without it, no micro batch was proven to hold")
        differing = differing or (proven, unproven, backed_off)
    if differing is not None:
        proven, parity, backed_off = differing
        return _certified(proven, parity, search, backed_off)
    return _none_holds(winner, search)


def _configs(winner: Record, others: Iterator[Record], search: ExamSearch) -> Iterator[Trial]:
    """The winner, then each other config that may hold although those before it did not."""
    yield winner.trial
    before = winner.trial
    while search.exams.left > 0 and (record := next(others, None)) is not None:
        config = search.timed_trial(record.trial)
        is_usual = record.trial.limited and record.trial.exam is None
        if is_usual and fits_well(record) and not search.rules_out(config):
            search.backed_off.append(f"from {_name(before)} to {_name(config)}: {search.last_shortage()}")
            yield config
            before = config


def _certified(
    proven: ProvenConfig, parity: ParityResult, search: ExamSearch, backed_off: tuple[str, ...]
) -> CertifyResult:
    exam = certificate_of_exam(proven.exam, limit_bytes=search.limit_bytes, usable_bytes=search.usable_bytes)
    certificate = with_verdict(
        replace(
            exam,
            parity=parity.parity,
            backed_off=backed_off,
            failures=exam.failures + _if_any(parity.failure),
            not_checked=exam.not_checked + _if_any(parity.not_checked),
        )
    )
    return _with_reason(proven.best, certificate, search)


def _none_holds(winner: Record, search: ExamSearch) -> CertifyResult:
    """The winner as it was found, with the reason that nothing is proven about it."""
    rung = search.short[-1].trial.rung if search.short else ""
    failure = f"no config was found that holds: {rung}, {search.last_shortage()}" if rung else None
    spent = f"no config was proven: {search.exams.spent}" if search.exams.left < 1 else None
    certificate = Certificate(
        passed=False,
        backed_off=tuple(search.backed_off),
        failures=_if_any(failure),
        not_checked=_if_any(spent),
    )
    return _with_reason(winner, certificate, search)


def _with_reason(best: Record, certificate: Certificate, search: ExamSearch) -> CertifyResult:
    first = search.known[0].trial
    proven = f"{_name(best.trial)} holds on the longest batch, in evaluation, and when a checkpoint is saved and loaded"
    instead = ""
    if certificate.backed_off and best is not search.known[0]:
        is_same = _name(best.trial) == _name(first)
        instead = f"; {certificate.backed_off[-1]}" if is_same else f"; taken instead of {_name(first)}"
    problems = "; ".join((*certificate.failures, *certificate.not_checked))
    reason = (proven if certificate.passed else problems) + instead
    return CertifyResult(best=best, certificate=certificate, records=tuple(search.exams.records), reason=reason)


def _name(config: Trial) -> str:
    recomputing = ", recomputing" if config.knobs.checkpointing else ""
    return f"{config.rung} (micro batch {config.knobs.micro_batch}{recomputing})"


def _if_any(sentence: str | None) -> tuple[str, ...]:
    return () if sentence is None else (sentence,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenConfig:
    """A config that does not lack memory on the longest batch: its timed trial and its exam."""

    best: Record
    exam: Record


@dataclass(slots=True, kw_only=True)
class ExamSearch:
    """The search for the largest micro batch that holds on the longest batch.

    `known` are trials that were run before, the winner first.
    `short` are records of configs that did not hold.
    `reserve` is the number of trials that the comparison of losses will need.
    `longest_ratio` is explained in `next_micro_batch`.
    `backed_off` has a sentence for each change.
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
        """Device memory less the headroom."""
        return self.limit_bytes * (1 - self.headroom)

    def prove(self, config: Trial) -> ProvenConfig | None:
        """The config at the largest micro batch that holds; None when none does or trials are spent.

        No size above that of `config` is tried. An exam that fails for another reason than memory counts as
        holding: a smaller micro batch would not help.
        """
        too_large: list[int] = []
        while (exam := self._examine(config)) is not None:
            lacks_memory = lacks_device_memory(exam.outcome, self.limit_bytes)
            if not lacks_memory:
                exam = self._larger(exam, too_large)
            size = exam.trial.knobs.micro_batch
            record = exam if lacks_memory else self._time(self.timed_trial(exam.trial))
            if record is None:
                return None
            if not lacks_memory and (record is self.known[0] or fits_well(record)):
                return ProvenConfig(best=record, exam=exam)
            self.short.append(record)
            # After an exam that held, but whose timed trial ran short, the search starts afresh from its size.
            too_large = [*too_large, size] if lacks_memory else [size]
            following = None
            if grows_with_batch(record.outcome):
                following = self._next_size(config, too_large, {}, self._sizes_below(size))
            if following is None:
                return None
            self.backed_off.append(f"{config.rung} from micro batch {size} to {following}: {self.last_shortage()}")
            config = self.timed_trial(config, following)
        return None

    def timed_trial(self, config: Trial, micro_batch: int | None = None) -> Trial:
        """The trial that times this config as the winner was timed, at the fit's global batch."""
        size = config.knobs.micro_batch if micro_batch is None else micro_batch
        accumulation = config.knobs.accumulation
        if self.global_batch is not None:
            accumulation = accumulation_for(self.global_batch, size, self.world_size)
        knobs = replace(config.knobs, micro_batch=size, accumulation=accumulation)
        return replace(config, knobs=knobs, purpose="verify", steps=self.known[0].trial.steps, exam=None, repeat=0)

    def rules_out(self, config: Trial) -> bool:
        """Whether a config that ran short needs no more memory: the same rung, as lean in batch and checkpointing."""
        return any(
            record.trial.rung == config.rung
            and (record.trial.knobs.micro_batch <= config.knobs.micro_batch or not grows_with_batch(record.outcome))
            and (record.trial.knobs.checkpointing or not config.knobs.checkpointing)
            for record in self.short
        )

    def last_shortage(self) -> str:
        """Why the last config did not hold, as a clause."""
        last = self.short[-1]
        batch = "the longest batch" if last.trial.exam == "worst_case" else "the usual batch"
        size = last.trial.knobs.micro_batch
        return f"on {batch}, micro batch {size} {describe_exam(last.outcome, self.limit_bytes)}"

    def _examine(self, config: Trial) -> Record | None:
        """Run the config's exam; its steps are shortened to their time budget."""
        first, knobs = self.known[0], config.knobs
        samples = knobs.micro_batch * knobs.accumulation
        more = samples / (first.trial.knobs.micro_batch * first.trial.knobs.accumulation)
        step_s = median_step_s(first) * more * self.longest_ratio
        steps = fit_steps_to_budget(self.steps, step_s, least=_FEWEST_EXAM_STEPS)
        return self.exams.examine(replace(config, purpose="certify", exam="worst_case", steps=steps, repeat=0))

    def _time(self, config: Trial) -> Record | None:
        """The config's timed trial on the usual batch: a known one, or a new one."""
        for record in self.known:
            trial = record.trial
            is_timed = trial.purpose != "walk" and trial.exam is None and trial.limited
            is_same = (trial.rung, trial.knobs) == (config.rung, config.knobs)
            if is_same and (record is self.known[0] or (is_timed and fits_well(record))):
                return record
        return self.exams.examine(config)

    def _larger(self, exam: Record, too_large: Sequence[int]) -> Record:
        """The exam of a larger micro batch that holds, below those that do not; else this one."""
        if not too_large or not isinstance(exam.outcome, Fit):
            return exam
        best, short = exam, list(too_large)
        holds = {exam.trial.knobs.micro_batch: exam.outcome.device_peak_bytes}
        for _ in range(_TRIALS_UPWARDS):
            size = max(holds)
            following = self._next_size(exam.trial, short, holds, self._sizes_below(min(short)))
            if following is None or self.exams.left < self.reserve + 2:  # one of them times the config
                break
            larger = self._examine(self.timed_trial(exam.trial, following))
            if (
                larger is None
                or not isinstance(larger.outcome, Fit)
                or lacks_device_memory(larger.outcome, self.limit_bytes)
            ):
                short.insert(0, following)
                continue
            self.backed_off.append(f"{exam.trial.rung} from micro batch {size} up to {following}: it holds, too")
            holds[following] = larger.outcome.device_peak_bytes
            best = larger
        return best

    def _next_size(
        self, config: Trial, too_large: Sequence[int], holds: Mapping[int, int], sizes: Sequence[int]
    ) -> int | None:
        return next_micro_batch(
            too_large,
            holds,
            sizes,
            line=usual_memory_line(config, self.known),
            usable_bytes=self.usable_bytes,
            longest_ratio=self.longest_ratio,
        )

    def _sizes_below(self, size: int) -> Sequence[int]:
        """Smaller micro batches, without those that the model cannot be trained with."""
        seen = [(record.trial.knobs.micro_batch, record.outcome) for record in (*self.known, *self.exams.records)]
        fits = min((size for size, outcome in seen if isinstance(outcome, Fit)), default=size)
        too_small = (size for size, outcome in seen if isinstance(outcome, Failed) and outcome.wants_larger_batch)
        least = max((size for size in too_small if size < fits), default=0)  # larger ones failed for other reasons
        return [other for other in micro_batches(self.global_batch, self.world_size, size - 1) if other > least]
