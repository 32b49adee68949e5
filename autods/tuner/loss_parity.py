"""Does the winner compute what a plain config does? Losses on the same samples, side by side; and which knob if not."""

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
    """What comparing found. parity: None when there was nothing to compare, or it could not be.

    taken_back: the winner with the knob that changed the maths as the reference has it; `without` is so of it; changed:
    what was taken back and why. The sentences are for the certificate.
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
    """Run both on the same samples, `steps` optimizer steps, and find the knob when their losses part.

    Nothing is run when the two differ in the batch only: how samples are cut into micro batches is no change of maths.
    alike: both with the micro batch that the reference is known to fit, because a script deals out its samples by it.
    """
    plain = reference.trial
    if is_same_maths(winner, plain):
        return ParityResult()
    batch = (cut_the_same if alike else cut_alike)(plain.knobs, winner.knobs)
    comparing = _Comparing(exams=exams, steps=steps, limit_bytes=limit_bytes, batch=batch if alike else None)
    ran = comparing.run(winner)
    if isinstance(ran, str):
        return ParityResult(not_checked=f"parity was not checked: {winner.rung} {ran}")
    plainly = comparing.run(replace(plain, knobs=batch))
    if isinstance(plainly, str):
        return ParityResult(not_checked=f"parity was not checked: {plain.rung}, the reference, {plainly}")
    if why := why_not_comparable(ran, plainly):
        return ParityResult(not_checked=f"parity was not checked: {why}")
    ours, theirs = ran.losses, plainly.losses
    if not any(map(math.isfinite, theirs)):
        return ParityResult(not_checked=f"parity was not checked: no loss of {plain.rung}, the reference, is finite")
    apart = largest_difference(ours, theirs)
    parity = Parity(
        reference=plain.rung,
        steps=min(len(ours), len(theirs)),
        tolerance=tolerance,
        largest_difference=apart,
        within=apart <= tolerance,
    )
    return ParityResult(parity=parity) if parity.within else _guilty(winner, plain, comparing, theirs, parity)


def is_same_maths(winner: Trial, plain: Trial) -> bool:
    """Whether they differ in the batch only."""
    return winner.rung == plain.rung and not differing_knobs(winner.knobs, plain.knobs)


def differing_knobs(knobs: Knobs, plain: Knobs) -> tuple[str, ...]:
    """The names of the knobs in which the two differ, the batch aside."""
    names = dict.fromkeys((*knobs.settings, *plain.settings))
    apart = [name for name in names if knobs.settings.get(name) != plain.settings.get(name)]
    return (*apart, *((CHECKPOINTING,) if knobs.checkpointing != plain.checkpointing else ()))


def with_knob_of(knobs: Knobs, plain: Knobs, name: str) -> Knobs:
    """With one knob as the plain config has it; removed where it has none."""
    if name == CHECKPOINTING:
        return replace(knobs, checkpointing=plain.checkpointing)
    if name in plain.settings:
        return replace(knobs, settings={**knobs.settings, name: plain.settings[name]})
    return replace(knobs, settings={key: value for key, value in knobs.settings.items() if key != name})


def cut_alike(plain: Knobs, winner: Knobs) -> Knobs:
    """The plain config on as many samples as the winner's: the largest micro batch that divides them and is no larger
    than it is known to fit."""
    samples = winner.micro_batch * winner.accumulation
    size = max(one for one in range(1, min(plain.micro_batch, samples) + 1) if samples % one == 0)
    return replace(plain, micro_batch=size, accumulation=samples // size)


def cut_the_same(plain: Knobs, winner: Knobs) -> Knobs:
    """As `cut_alike`; where neither accumulates nor has to, none begins to: a script may have no argument for it."""
    if winner.accumulation == plain.accumulation == 1:
        return replace(plain, micro_batch=min(plain.micro_batch, winner.micro_batch))
    return cut_alike(plain, winner)


def why_not_comparable(one: Fit, other: Fit) -> str | None:
    """Why the losses of two trials of a script say nothing of each other; None: they do, or it is no script."""
    if one.trained is None and other.trained is None:
        return None
    if one.trained is None or other.trained is None or one.trained.samples is None or other.trained.samples is None:
        return "the samples of the script were not seen"
    if one.trained.samples != other.trained.samples:
        return "the script draws other samples in each run (has it a seed, for shuffling, too?)"
    ours, theirs = one.trained.weights, other.trained.weights
    if ours is None or theirs is None:
        return "the weights with which it begins were not seen"
    if abs(ours - theirs) > _SAME_WEIGHTS * max(abs(theirs), _TINY):
        return "the script begins with other weights under each config"
    return None


def largest_difference(losses: Sequence[float], plain: Sequence[float]) -> float:
    """The largest relative difference, step by step; infinite where only one of two losses is finite."""
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
class _Comparing:
    """What is given and stays."""

    exams: Exams
    steps: Steps
    limit_bytes: int
    batch: Knobs | None = None  # whose micro batch and accumulation all configs take; None: each its own

    def run(self, config: Trial) -> Fit | str:
        """With losses on the samples that all compared configs get, or why there are none."""
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


def _guilty(
    winner: Trial, plain: Trial, comparing: _Comparing, theirs: Sequence[float], parity: Parity
) -> ParityResult:
    """Each knob alone set back: those with which the losses come within the tolerance changed the maths."""
    found: list[tuple[float, str, Trial]] = []
    unknown: list[str] = []
    for name, config in _each_set_back(winner, plain):
        ran = comparing.run(config)
        if isinstance(ran, str):
            unknown.append(f"with {name} set back it {ran}")
        elif (apart := largest_difference(ran.losses, theirs)) <= parity.tolerance:
            found.append((apart, name, config))
    said = (
        f"losses differ by {share(parity.largest_difference)} from {plain.rung}'s, tolerance {share(parity.tolerance)}"
    )
    if not found:
        why = "; ".join(unknown) or (f"{winner.rung} itself or a combination of its knobs changes the maths")
        return ParityResult(parity=parity, failure=f"{said}: {why}")
    apart, name, config = min(found, key=lambda item: item[0])
    names = tuple(name for _, name, _ in found)
    return ParityResult(
        parity=replace(parity, changed_by=names),
        taken_back=config,
        without=replace(parity, changed_by=names, taken_back=name, largest_difference=apart, within=True),
        changed=f"{name} taken back to {_shown(plain, name)}: with {_shown(winner, name)} {said}",
        failure=f"{said}: changed by {', '.join(names)}",
    )


def _each_set_back(winner: Trial, plain: Trial) -> Iterator[tuple[str, Trial]]:
    for name in differing_knobs(winner.knobs, plain.knobs):
        yield name, replace(winner, knobs=with_knob_of(winner.knobs, plain.knobs, name))


def _shown(trial: Trial, name: str) -> str:
    value = trial.knobs.checkpointing if name == CHECKPOINTING else trial.knobs.settings.get(name, "its default")
    return str(value).lower() if isinstance(value, bool) else str(value)
