"""Certify the winner on the longest batch, and back off where it does not hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..config.checkpointing import find_state, is_as_lean
from ..config.deepspeed import precision_name, uses_autocast
from ..config.settings import Settings
from ..report.results.fit import Certificate
from ..report.text import format_about
from ..types import Failed, Fit, Knobs, Record, Steps, Trial
from .batch_curve import BatchCurve, MemoryLine
from .candidates import Candidate, first_trial
from .certificate import certificate_of_exam, describe_exam, grows_with_batch, lacks_device_memory
from .contestant import try_rung
from .forecaster import why_impossible
from .loss_parity import FEWEST_UPDATES, Batches, ParityResult, choose_batches, compare_losses, is_same_maths
from .trials import FitContext, fit_steps_to_budget, fits_well, median_step_s, run_with_retry

# Losses of two configs that compute the same differ by rounding alone. Measured on CPU ranks, over rungs, cuts of the
# batch, buckets and checkpointing: up to 3e-7 in fp32, 8e-3 in bf16 where the model computes its loss in bf16. There a
# learning rate that is a tenth wrong may not show in losses at all; it shows in `loss_parity.UPDATE_TOLERANCE`.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}
_TRIALS_UPWARDS = 2  # exams of larger micro batches than one that holds
_FEWEST_EXAM_STEPS = 4  # after the first: a leak shows in three steps after the second, see `growth_per_step`
EXAM_STEPS = 3  # besides the exam's own: one after saving, one after loading, and two evaluations count as another
_COMPARISON_TRIALS = 2  # the config and the reference
_NONE_BUILT_ALIKE = (
    "parity was not checked: --zero-init gives stage 3 other random weights than other stages, and no second config"
    " that is built like this one fits"
)
_WORTH_AN_EXAM = 1.125  # ratio of a larger micro batch to one that holds
_LONGER = 1.05  # ratio of elements below which the longest batch counts as a usual one


@dataclass(frozen=True, slots=True, kw_only=True)
class CertifyResult:
    """The config to take as a timed trial, its certificate, and the reason."""

    best: Record
    certificate: Certificate
    reason: str


def certify(
    winner: Record,
    context: FitContext,
    *,
    alternates: Sequence[Record],
    reference: Record,
    untried: Sequence[Candidate] = (),
) -> CertifyResult | None:
    """Prove the winner, or the config to take instead; None when the profile wants no certificate, and in a rehearsal.

    The micro batch shrinks when the longest batch lacks memory. When no micro batch holds, another config is examined:
    the next of `alternates` (configs that fitted, best first), then an `untried` rung that fits, by its forecast, too.

    `reference` is a plain config known to fit. The winner's losses have to match it within the tolerance of the
    precision, unless the profile compares no losses. A knob that changes them is reverted.
    """
    settings, limits = context.settings, context.settings.profile.certify
    if limits.most_trials < 1 or settings.rehearsed:  # nothing runs there, so there is nothing to prove
        return None
    tolerance = find_tolerance(settings)
    plain = find_reference(winner.trial, reference, context)
    has_comparison = limits.parity is not None and plain is not None and not is_same_maths(winner.trial, plain)
    search = _ExamSearch(
        context=context,
        known=(winner, *alternates, reference, *context.memory.records),
        reserve=_COMPARISON_TRIALS if has_comparison else 0,
    )

    def compare(config: Record, run: Callable[[Trial], Fit | str], *, later_s: float = 0.0) -> ParityResult:
        if limits.parity is None:
            return ParityResult()
        if (plain := find_reference(config.trial, reference, context)) is None:
            return ParityResult(not_checked=_NONE_BUILT_ALIKE)
        if not is_same_maths(config.trial, plain) and (lack := search.lacks_time(config, plain, later_s)):
            return ParityResult(not_checked=lack)
        return compare_losses(
            config.trial,
            plain,
            run,
            steps=make_parity_steps(config, limits.parity),
            tolerance=tolerance,
            batches=cut_batches(config, plain, context),
        )

    if has_comparison and search.left > _COMPARISON_TRIALS and runs_losses_first(context):
        # The same trials, asked for again below, are answered by these.
        compare(winner, search.run_ahead, later_s=search.estimate_exam_s(winner.trial))
    differing: CertifyResult | None = None  # holds, but its losses differ
    for config in _configs(search, alternates, untried):
        if (proven := search.prove(config)) is None:
            continue
        parity = compare(proven.best, search.run_for_losses)
        if parity.taken_back is None:
            return search.certified(proven, parity)
        unproven = replace(parity, failure=f"{parity.failure}; without it, no micro batch was proven to hold")
        differing = differing or search.certified(proven, unproven)
        search.backed_off.append(parity.changed)
        if (without := search.prove(search.timed_trial(parity.taken_back))) is not None:
            return search.certified(without, ParityResult(parity=parity.without))
    if differing is not None:
        return differing
    certificate = Certificate(backed_off=tuple(search.backed_off))
    if search.short:
        failure = f"no config was found that holds: {search.short[-1].trial.rung}, {search.last_shortage()}"
        certificate = replace(certificate, failures=(failure,))
    if search.left < 1:
        certificate = replace(certificate, not_checked=(f"no config was proven: {search.spent}",))
    return search.result(winner, certificate)


def find_tolerance(settings: Settings) -> float:
    """The relative difference of losses that rounding explains, in the lowest precision of the configs that may win.

    torch's autocast rounds as half precision does, although weights are in fp32.
    """
    names = (precision_name(settings.base), *settings.precisions, *(["bf16"] if uses_autocast(settings.base) else []))
    return max(TOLERANCE[name] for name in names)


def runs_losses_first(context: FitContext) -> bool:
    """Whether the winner's losses are compared before its exam, while nodes share the model built for the search.

    The exam's ranks share none, so that the model would be built once more for the comparison. Where the longest batch
    is longer than a usual one, the exam may choose a smaller micro batch, and is worth more as the first.
    """
    return context.facts.longest_ratio < _LONGER


def make_parity_steps(config: Record, steps: Steps) -> Steps:
    """The steps of each trial that compares losses with the config's, few where one of them takes many seconds."""
    return fit_steps_to_budget(steps, median_step_s(config), least=FEWEST_UPDATES + 1)


def cut_batches(config: Record, plain: Trial, context: FitContext) -> tuple[Knobs, Knobs]:
    """The knobs of the config and of `plain` with the batches on which their losses are compared."""
    steps, trial = context.settings.profile.certify.parity, config.trial
    assert steps is not None, "losses are compared"
    batches: Batches = "own"
    if context.settings.source.form.runs_as_main:
        batches = "alike"
    elif (FEWEST_UPDATES + 1) * median_step_s(config) > steps.budget_s:
        batches = "few"
    sizes = (record.trial.knobs.micro_batch for record in context.memory.records if isinstance(record.outcome, Fit))
    return choose_batches(trial.knobs, plain.knobs, batches, smallest=min([trial.knobs.micro_batch, *sizes]))


def estimate_comparison_s(config: Record, plain: Trial, context: FitContext) -> float:
    """The seconds of the two trials that compare the config's losses with those of `plain`."""
    steps = context.settings.profile.certify.parity
    assert steps is not None, "losses are compared"
    steps = make_parity_steps(config, steps)
    return 2 * context.start_s + (steps.warmup + steps.timed) * sum(time_compared_steps(config, plain, context))


def time_compared_steps(config: Record, plain: Trial, context: FitContext) -> tuple[float, float]:
    """The seconds of a step of the config, and of `plain` on the same samples; unknown, as those that were measured."""
    ours, theirs = cut_batches(config, plain, context)
    measured_s = median_step_s(config)

    def forecast_s(trial: Trial) -> float:
        step = context.forecaster.step_time(trial)
        return measured_s if step is None else step.seconds

    own_s = measured_s if ours == config.trial.knobs else forecast_s(replace(config.trial, knobs=ours))
    return own_s, forecast_s(replace(plain, knobs=theirs))


def find_reference(winner: Trial, reference: Record, context: FitContext) -> Trial | None:
    """The plain config for the winner's losses, at the largest micro batch that is known to fit.

    Where the reference is the winner but for its batch, a config of another rung that fits takes its place.
    With `--zero-init` only stage 3 is built in parts, with other random weights than a whole model has. There a
    reference of another build is replaced by the first config that is built as the winner is, and fits with other
    knobs. None where there is none. The weights of a checkpoint are the same in each build.
    """
    settings = context.settings

    def is_split(trial: Trial) -> bool:
        return settings.source.zero_init and not settings.source.weights and settings.rung(trial.rung).stage == 3

    usual = [record for record in context.memory.records if record.trial.exam is None and record.trial.limited]
    fitting = [record for record in usual if context.fits(record)]
    others = [record for record in fitting if not is_same_maths(record.trial, winner)]
    candidates = [reference, *others]
    if is_same_maths(reference.trial, winner):  # says nothing of the winner's maths: another rung says most
        candidates = [*sorted(others, key=lambda record: record.trial.rung == winner.rung), reference]
    plain = next((record for record in candidates if is_split(record.trial) == is_split(winner)), None)
    if plain is None:
        return None
    # At micro batch 1 the winner's samples take far longer. What fits with its activations kept fits without them, too.
    recomputes = plain.trial.knobs.checkpointing
    trials = [
        replace(record.trial, knobs=replace(record.trial.knobs, checkpointing=recomputes))
        for record in fitting
        if recomputes is True or is_as_lean(plain.trial.knobs, record.trial.knobs)
    ]
    same = [trial for trial in trials if is_same_maths(trial, plain.trial)]
    return max([plain.trial, *same], key=lambda trial: trial.knobs.micro_batch)


def make_exam(config: Trial, context: FitContext, step_s: float) -> Trial:
    """The exam of a config; it has few steps where one on the longest batch takes many seconds, `step_s`."""
    steps = fit_steps_to_budget(context.settings.profile.certify.steps, step_s, least=_FEWEST_EXAM_STEPS)
    return replace(config, purpose="certify", exam="worst_case", steps=steps, repeat=0)


def _configs(search: _ExamSearch, alternates: Sequence[Record], untried: Sequence[Candidate]) -> Iterator[Trial]:
    """The winner, then each other config that may hold although those before it did not."""
    context, before = search.context, search.winner.trial
    yield before

    def others() -> Iterator[Record]:
        yield from alternates
        for candidate in untried:
            first = first_trial(candidate, context.settings.profile.walk, context.sizes[0])
            tried = () if why_impossible(context.forecast(first)) else try_rung(candidate, context, context.run)
            yield from (last for last in tried[-1:] if isinstance(last.outcome, Fit))

    rivals = others()
    while search.left > 0 and (record := next(rivals, None)) is not None:
        config = search.timed_trial(record.trial)
        is_usual = record.trial.limited and record.trial.exam is None
        if is_usual and fits_well(record) and not search.rules_out(config):
            search.backed_off.append(f"from {_name(before)} to {_name(config)}: {search.last_shortage()}")
            yield config
            before = config


def _name(config: Trial) -> str:
    state = find_state(config.knobs)
    checkpointing = {"off": "", "on": ", recomputing"}.get(state, f", checkpointing {state}")
    return f"{config.rung} (micro batch {config.knobs.micro_batch}{checkpointing})"


class _ProvenConfig(NamedTuple):
    """A config that does not lack memory on the longest batch: its timed trial and its exam."""

    best: Record
    exam: Record


@dataclass(slots=True, kw_only=True)
class _ExamSearch:
    """The search for the largest micro batch that holds on the longest batch, in the profile's number of trials.

    `known` are trials that were run before, the winner first. They show how memory grows, and are not timed again.
    `reserve` is the number of trials that the comparison of losses will need.
    `records` are the trials of the certificate, in order.
    `short` are records of configs that did not hold.
    `backed_off` has a sentence for each change.
    """

    context: FitContext
    known: tuple[Record, ...]
    reserve: int
    records: list[Record] = field(default_factory=list)
    short: list[Record] = field(default_factory=list)
    backed_off: list[str] = field(default_factory=list)
    _answers: list[tuple[Trial, Record]] = field(default_factory=list)
    _ahead: list[tuple[Trial, Record]] = field(default_factory=list)

    @property
    def winner(self) -> Record:
        """The fit's winner."""
        return self.known[0]

    @property
    def left(self) -> int:
        """How many trials may still be run."""
        return self.context.settings.profile.certify.most_trials - len(self.records)

    @property
    def spent(self) -> str:
        """Why no more trials are run, as a clause."""
        return f"all {self.context.settings.profile.certify.most_trials} trials of the certificate are spent"

    def run(self, trial: Trial) -> Record | None:
        """The trial's record, from an earlier run of it where there is one; None when no trials are left.

        A failure that may be accidental is repeated once. One after the steps (a disk too full for a checkpoint) ends
        no fit.
        """
        known = next((record for earlier, record in self._answers if earlier == trial), None)
        if known is not None or self.left < 1:
            return known

        def run_once(trial: Trial) -> Record:
            record = next((record for ran, record in self._ahead if ran == trial), None)
            record = record or self.context.memory.run(trial)
            ran_its_steps = record.outcome.kind != "fit" and record.outcome.phase in ("evaluate", "save", "load")
            self.records.append(record if ran_its_steps else self.context.check(record))
            return self.records[-1]

        record = run_with_retry(trial, run_once)[-1] if self.left > 1 else run_once(trial)
        self._answers.append((trial, record))
        return record

    def lacks_time(self, config: Record, plain: Trial, later_s: float) -> str | None:
        """A sentence where the budget has no time to compare losses, with `later_s` seconds kept for the exam.

        None where a trial of the comparison has run, in this fit or before it was stopped.
        """
        left_s = self.context.left_s - later_s
        known = (*self.records, *(record for _, record in self._ahead), *self.context.memory.known_records)
        if math.isinf(left_s) or any(record.trial.exam == "parity" for record in known):
            return None
        needed_s = estimate_comparison_s(config, plain, self.context)
        if needed_s <= left_s:
            return None
        left = f"the budget has {format_about(left_s)} left" if left_s > 0 else "the budget is spent"
        return f"losses were not compared with those of {plain.rung}: that takes {format_about(needed_s)}, and {left}"

    def run_for_losses(self, trial: Trial) -> Fit | str:
        """The fit of a trial with losses, or the reason that there is none."""
        if (record := self.run(trial)) is None:
            return f"was not run, {self.spent}"
        if not isinstance(record.outcome, Fit):
            return describe_exam(record.outcome, self.context.settings.device_bytes)
        return record.outcome if record.outcome.losses else "gave no losses"

    def timed_trial(self, config: Trial, micro_batch: int | None = None) -> Trial:
        """The trial that times this config as the winner was timed, at the fit's global batch."""
        knobs = self.context.resize(config.knobs, micro_batch or config.knobs.micro_batch)
        if knobs.micro_batch != config.knobs.micro_batch:
            knobs = replace(knobs, keeps_headroom=False)  # its forecast tells
        return replace(config, knobs=knobs, purpose="verify", steps=self.winner.trial.steps, exam=None, repeat=0)

    def run_ahead(self, trial: Trial) -> Fit | str:
        """As `run_for_losses`, for a trial that counts once it is asked for again: a config and its reference alone."""
        if len(self._ahead) < _COMPARISON_TRIALS:
            self._ahead.append((trial, self.context.memory.run(trial)))
            if isinstance(fit := self._ahead[-1][1].outcome, Fit) and fit.losses:
                return fit
        return "was not run yet"

    # The search

    def prove(self, config: Trial) -> _ProvenConfig | None:
        """The config at the largest micro batch that holds; None when none does or trials are spent.

        One whose allocator ran full is examined without the headroom first. No size above that of `config` is tried. An
        exam that fails for another reason than memory counts as holding: a smaller micro batch would not help.
        """
        too_large: list[int] = []
        while (exam := self._examine(config)) is not None:
            is_kept = exam.trial.knobs.keeps_headroom
            if isinstance(exam.outcome, Fit) and exam.outcome.alloc_retries and not is_kept:
                self.backed_off.append(f"{config.rung} without the headroom: {self._describe_shortage(exam)}")
                config = self.timed_trial(exam.trial).without_headroom()
                continue
            if lacks_device_memory(exam, self.context.settings.device_bytes):
                short, too_large = exam, [*too_large, exam.trial.knobs.micro_batch]
            else:
                exam = self._examine_larger(exam, too_large)
                if (record := self._time(self.timed_trial(exam.trial))) is None:
                    return None
                if record is self.winner or fits_well(record):
                    return _ProvenConfig(record, exam)
                # The exam held, but the timed trial ran short: the search starts afresh from its size.
                short, too_large = record, [exam.trial.knobs.micro_batch]
            self.short.append(short)
            following = self._smaller_size(config, too_large) if grows_with_batch(short.outcome) else None
            if following is None:
                return None
            step = f"from micro batch {too_large[-1]} to {following}"
            self.backed_off.append(f"{config.rung} {step}: {self.last_shortage()}")
            config = self.timed_trial(config, following)
        return None

    def rules_out(self, config: Trial) -> bool:
        """Whether a config that ran short needs no more memory: the same rung, as lean in batch and checkpointing.

        At the same micro batch, smaller buckets may make the difference.
        """

        def needs_no_more(record: Record) -> bool:
            size = record.trial.knobs.micro_batch
            if size < config.knobs.micro_batch:
                return True
            is_as_small = size == config.knobs.micro_batch or not grows_with_batch(record.outcome)
            return is_as_small and not _has_smaller_setting(config, record.trial)

        return any(
            record.trial.rung == config.rung and is_as_lean(record.trial.knobs, config.knobs) and needs_no_more(record)
            for record in self.short
        )

    def last_shortage(self) -> str:
        """Why the last config did not hold, as a clause."""
        return self._describe_shortage(self.short[-1])

    def _describe_shortage(self, record: Record) -> str:
        batch = "the longest batch" if record.trial.exam == "worst_case" else "the usual batch"
        why = describe_exam(record.outcome, self.context.settings.device_bytes)
        return f"on {batch}, micro batch {record.trial.knobs.micro_batch} {why}"

    def estimate_exam_s(self, config: Trial) -> float:
        """The seconds of the config's exam. Its checkpoint counts as a start: that builds as many parameters."""
        step_s = self._estimate_longest_step_s(config)
        steps = make_exam(config, self.context, step_s).steps
        return 2 * self.context.start_s + (steps.warmup + steps.timed + EXAM_STEPS) * step_s

    def _estimate_longest_step_s(self, config: Trial) -> float:
        first = self.winner
        more = config.knobs.train_batch(1) / first.trial.knobs.train_batch(1)
        return median_step_s(first) * more * self.context.facts.longest_ratio

    def _examine(self, config: Trial) -> Record | None:
        """Run the config's exam; its steps are shortened to their time budget."""
        return self.run(make_exam(config, self.context, self._estimate_longest_step_s(config)))

    def _time(self, config: Trial) -> Record | None:
        """The config's timed trial on the usual batch: a known one, or a new one."""
        for record in self.known:
            trial = record.trial
            is_timed = trial.purpose != "walk" and trial.exam is None and trial.limited
            is_same = (trial.rung, trial.knobs) == (config.rung, config.knobs)
            if is_same and (record is self.winner or (is_timed and fits_well(record))):
                return record
        return self.run(config)

    def _examine_larger(self, exam: Record, too_large: Sequence[int]) -> Record:
        """The exam of a larger micro batch that holds, below those that do not; else this one.

        The peak of an exam shows how far to go. When that was too far, the next size halves the ratio.
        """
        if not too_large or not isinstance(exam.outcome, Fit):
            return exam
        above, peak_bytes = min(too_large), exam.outcome.device_peak_bytes
        line = usual_memory_line(exam.trial, self.known)
        for _ in range(_TRIALS_UPWARDS):
            below = exam.trial.knobs.micro_batch
            fixed_bytes = 0.0 if line is None else min(line.fixed_bytes, peak_bytes)
            exam_line = MemoryLine(fixed_bytes=fixed_bytes, bytes_each=(peak_bytes - fixed_bytes) / below)
            went_too_far = above < too_large[-1]
            target = math.sqrt(below * above) if went_too_far else exam_line.largest(self.context.usable_bytes)
            sizes = [size for size in self._sizes_below(above) if _WORTH_AN_EXAM * below <= size <= target]
            if not sizes or self.left < self.reserve + 2:  # one of them times the config
                break
            larger = self._examine(self.timed_trial(exam.trial, sizes[-1]))
            fit = None if larger is None else larger.outcome
            if (
                larger is None
                or not isinstance(fit, Fit)
                or lacks_device_memory(larger, self.context.settings.device_bytes)
            ):
                above = sizes[-1]
                continue
            step = f"from micro batch {below} up to {sizes[-1]}"
            self.backed_off.append(f"{exam.trial.rung} {step}: it holds, too")
            exam, peak_bytes = larger, fit.device_peak_bytes
        return exam

    def _smaller_size(self, config: Trial, too_large: Sequence[int]) -> int | None:
        """The micro batch to examine next; `too_large` ran out of memory on the longest batch, in this order.

        The first step down scales the memory line of the usual batch by the longest one's length. Further steps divide
        by 4, 8, ….
        """
        longest_ratio, target = self.context.facts.longest_ratio, too_large[-1] / 2 ** len(too_large)
        if len(too_large) == 1 and longest_ratio >= _LONGER:
            line = usual_memory_line(config, self.known)
            target = too_large[-1] / longest_ratio
            if line is not None:
                line = replace(line, bytes_each=line.bytes_each * longest_ratio)
                target = line.largest(self.context.usable_bytes)
        sizes = self._sizes_below(too_large[-1])
        return max((size for size in sizes if size <= target), default=sizes[0] if sizes else None)

    def _sizes_below(self, size: int) -> Sequence[int]:
        """Smaller micro batches, without those that the model cannot be trained with."""
        seen = [(record.trial.knobs.micro_batch, record.outcome) for record in (*self.known, *self.records)]
        fits = min((size for size, outcome in seen if isinstance(outcome, Fit)), default=size)
        too_small = (size for size, outcome in seen if isinstance(outcome, Failed) and outcome.wants_larger_batch)
        least = max((size for size in too_small if size < fits), default=0)  # larger ones failed for other reasons
        return [other for other in self.context.sizes if least < other < size]

    # Results

    def certified(self, proven: _ProvenConfig, parity: ParityResult) -> CertifyResult:
        """The result with the certificate of a config that holds."""
        limit_bytes, usable_bytes = self.context.settings.device_bytes, self.context.usable_bytes
        certificate = certificate_of_exam(proven.exam, limit_bytes=limit_bytes, usable_bytes=usable_bytes)
        failures = (*certificate.failures, *([parity.failure] if parity.failure else []))
        not_checked = (*certificate.not_checked, *([parity.not_checked] if parity.not_checked else []))
        certificate = replace(
            certificate,
            passed=not (failures or not_checked),
            parity=parity.parity,
            backed_off=tuple(self.backed_off),
            failures=failures,
            not_checked=not_checked,
        )
        return self.result(proven.best, certificate)

    def result(self, best: Record, certificate: Certificate) -> CertifyResult:
        """The result with the reason in words."""
        name, first = _name(best.trial), _name(self.winner.trial)
        reason = f"{name} holds on the longest batch, in evaluation, and when a checkpoint is saved and loaded"
        if not certificate.passed:
            reason = "; ".join((*certificate.failures, *certificate.not_checked))
        if certificate.backed_off and best is not self.winner:
            reason += f"; {certificate.backed_off[-1]}" if name == first else f"; taken instead of {first}"
        return CertifyResult(best=best, certificate=certificate, reason=reason)


def _has_smaller_setting(config: Trial, other: Trial) -> bool:
    """Whether the config has a smaller bucket than the other one, or a switch off that is on there."""
    settings, others = config.knobs.settings, other.knobs.settings
    pairs = [(settings[key], others[key]) for key in settings.keys() & others.keys()]
    return any(value < limit for value, limit in pairs if not isinstance(value, str) and not isinstance(limit, str))


def usual_memory_line(config: Trial, records: Iterable[Record]) -> MemoryLine | None:
    """The memory line of a config on the usual batch; None where the records do not show how its peak grows."""
    peaks = BatchCurve.from_records(
        record
        for record in records
        if (record.trial.rung, record.trial.exam) == (config.rung, None)
        and find_state(record.trial.knobs) == find_state(config.knobs)
    ).peak_bytes
    if len(peaks) < 2:
        return None
    most = max(peaks)
    least = max((size for size in peaks if 2 * size <= most), default=min(peaks))  # the peak bends upwards
    line = MemoryLine.through(peaks, least, most)
    return replace(line, fixed_bytes=max(0.0, line.fixed_bytes)) if line.bytes_each > 0 else None
