"""Compare the winner's losses with a plain config's on the same samples, and find the knob that changes them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..types import Fit, Knobs, Record, Steps, Trial
from .certificate import Parity
from .exams import Exams, describe_exam

CHECKPOINTING = "checkpointing"
_TINY = 1e-12  # a loss of 0 has no relative difference
_SAME_WEIGHTS = 1e-9  # relative: their sum in another order


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityResult:
    """The result of a comparison. `parity` is None when there was nothing to compare, or it was not possible.

    `taken_back` is the winner with the knob that changed its losses set as in the reference.
    `without` is the parity of that config.
    `changed` names that knob and the reason; like `failure` and `not_checked` it is a sentence of the certificate.
    """

    parity: Parity | None = None
    taken_back: Trial | None = None
    without: Parity | None = None
    changed: str = ""
    failure: str | None = None
    not_checked: str | None = None


def compare_losses(
    winner: Trial, reference: Record, exams: Exams, *, steps: Steps, tolerance: float, limit_bytes: int, alike: bool
) -> ParityResult:
    """Run both configs on the same samples, and find the knob that changes the losses where these differ.

    Nothing is run when the two differ in the batch only: the cut into micro batches does not change the maths. With
    `alike` both use the micro batch at which the reference is known to fit, because a script deals out samples by it.
    """
    plain = reference.trial
    if is_same_maths(winner, plain):
        return ParityResult()
    batch = (same_batch if alike else same_samples)(plain.knobs, winner.knobs)
    comparison = _Comparison(exams=exams, steps=steps, limit_bytes=limit_bytes, batch=batch if alike else None)
    fit = comparison.run(winner)
    if isinstance(fit, str):
        return ParityResult(not_checked=f"parity was not checked: {winner.rung} {fit}")
    reference_fit = comparison.run(replace(plain, knobs=batch))
    if isinstance(reference_fit, str):
        return ParityResult(not_checked=f"parity was not checked: {plain.rung}, the reference, {reference_fit}")
    if why := why_not_comparable(fit, reference_fit):
        return ParityResult(not_checked=f"parity was not checked: {why}")
    losses, expected = fit.losses, reference_fit.losses
    if not any(map(math.isfinite, expected)):
        return ParityResult(not_checked=f"parity was not checked: no loss of {plain.rung}, the reference, is finite")
    apart = largest_difference(losses, expected)
    parity = Parity(
        reference=plain.rung,
        steps=min(len(losses), len(expected)),
        tolerance=tolerance,
        largest_difference=apart,
        within=apart <= tolerance,
    )
    return ParityResult(parity=parity) if parity.within else _find_knob(winner, plain, comparison, expected, parity)


def is_same_maths(winner: Trial, plain: Trial) -> bool:
    """Whether the two differ in the batch only."""
    return winner.rung == plain.rung and not differing_knobs(winner.knobs, plain.knobs)


def differing_knobs(knobs: Knobs, plain: Knobs) -> tuple[str, ...]:
    """The names of the knobs in which the two differ, apart from the batch."""
    names = dict.fromkeys((*knobs.settings, *plain.settings))
    apart = [name for name in names if knobs.settings.get(name) != plain.settings.get(name)]
    return (*apart, *((CHECKPOINTING,) if knobs.checkpointing != plain.checkpointing else ()))


def with_knob_of(knobs: Knobs, plain: Knobs, name: str) -> Knobs:
    """The knobs with one of them as in the plain config; removed where that has none."""
    if name == CHECKPOINTING:
        return replace(knobs, checkpointing=plain.checkpointing)
    if name in plain.settings:
        return replace(knobs, settings={**knobs.settings, name: plain.settings[name]})
    return replace(knobs, settings={key: value for key, value in knobs.settings.items() if key != name})


def same_samples(plain: Knobs, winner: Knobs) -> Knobs:
    """The plain config on as many samples as the winner, at the largest divisor up to its micro batch."""
    samples = winner.micro_batch * winner.accumulation
    size = max(size for size in range(1, min(plain.micro_batch, samples) + 1) if samples % size == 0)
    return replace(plain, micro_batch=size, accumulation=samples // size)


def same_batch(plain: Knobs, winner: Knobs) -> Knobs:
    """Like `same_samples`, but without accumulation where neither has any: a script may have no argument for it."""
    if winner.accumulation == plain.accumulation == 1:
        return replace(plain, micro_batch=min(plain.micro_batch, winner.micro_batch))
    return same_samples(plain, winner)


def why_not_comparable(first: Fit, second: Fit) -> str | None:
    """The reason that the losses of two trials of a script cannot be compared; None when they can, or for no script."""
    if first.trained is None and second.trained is None:
        return None
    if first.trained is None or second.trained is None:
        return "the samples of the script were not seen"
    if first.trained.samples is None or second.trained.samples is None:
        return "the samples of the script were not seen"
    if first.trained.samples != second.trained.samples:
        return "the script draws other samples in each run (has it a seed, for shuffling, too?)"
    weights, expected = first.trained.weights, second.trained.weights
    if weights is None or expected is None:
        return "the weights with which it begins were not seen"
    if abs(weights - expected) > _SAME_WEIGHTS * max(abs(expected), _TINY):
        return "the script begins with other weights under each config"
    return None


def largest_difference(losses: Sequence[float], plain: Sequence[float]) -> float:
    """The largest relative difference of two losses of a step; infinite where only one of them is finite."""
    return max(map(_apart, losses, plain), default=math.inf)


def _apart(loss: float, plain: float) -> float:
    if not math.isfinite(loss) or not math.isfinite(plain):
        return 0.0 if math.isfinite(loss) == math.isfinite(plain) else math.inf
    return abs(loss - plain) / max(abs(plain), _TINY)


def share(value: float) -> str:
    """0.0041 → '0.41 %'."""
    if not math.isfinite(value):
        return "more than any share (a loss is not finite)"
    return f"{100 * value:.2g} %" if value < 1 else f"{100 * value:.0f} %"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """The inputs of a comparison.

    `batch` is the micro batch and accumulation of all configs; None lets each config keep its batch.
    """

    exams: Exams
    steps: Steps
    limit_bytes: int
    batch: Knobs | None = None

    def run(self, config: Trial) -> Fit | str:
        """The config's fit with losses on the compared samples, or the reason that there are none."""
        knobs = config.knobs
        if self.batch is not None:
            knobs = replace(knobs, micro_batch=self.batch.micro_batch, accumulation=self.batch.accumulation)
        trial = replace(config, knobs=knobs, purpose="certify", exam="parity", steps=self.steps, repeat=0)
        answer = self.exams.examine(trial)
        if answer is None:
            return f"was not run, {self.exams.spent}"
        if not isinstance(answer.outcome, Fit):
            return describe_exam(answer.outcome, self.limit_bytes)
        return answer.outcome if answer.outcome.losses else "gave no losses"


def _find_knob(
    winner: Trial, plain: Trial, comparison: _Comparison, expected: Sequence[float], parity: Parity
) -> ParityResult:
    """Set back one knob at a time: those that bring the losses within the tolerance changed the maths."""
    culprits: list[tuple[float, str, Trial]] = []
    unknown: list[str] = []
    for name, config in _each_set_back(winner, plain):
        fit = comparison.run(config)
        if isinstance(fit, str):
            unknown.append(f"with {name} set back it {fit}")
        elif (apart := largest_difference(fit.losses, expected)) <= parity.tolerance:
            culprits.append((apart, name, config))
    difference = (
        f"losses differ by {share(parity.largest_difference)} from {plain.rung}'s, tolerance {share(parity.tolerance)}"
    )
    if not culprits:
        why = "; ".join(unknown) or (f"{winner.rung} itself or a combination of its knobs changes the maths")
        return ParityResult(parity=parity, failure=f"{difference}: {why}")
    apart, name, config = min(culprits, key=lambda item: item[0])
    names = tuple(name for _, name, _ in culprits)
    return ParityResult(
        parity=replace(parity, changed_by=names),
        taken_back=config,
        without=replace(parity, changed_by=names, taken_back=name, largest_difference=apart, within=True),
        changed=f"{name} taken back to {_shown(plain, name)}: with {_shown(winner, name)} {difference}",
        failure=f"{difference}: changed by {', '.join(names)}",
    )


def _each_set_back(winner: Trial, plain: Trial) -> Iterator[tuple[str, Trial]]:
    for name in differing_knobs(winner.knobs, plain.knobs):
        yield name, replace(winner, knobs=with_knob_of(winner.knobs, plain.knobs, name))


def _shown(trial: Trial, name: str) -> str:
    value = trial.knobs.checkpointing if name == CHECKPOINTING else trial.knobs.settings.get(name, "its default")
    return str(value).lower() if isinstance(value, bool) else str(value)
