"""Compare the winner's losses with a plain config's on the same samples, and find the knob that changes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..report.results.fit import Parity
from ..types import Fit, Knobs, Steps, Trial

CHECKPOINTING = "checkpointing"
# Relative, of the mean change of a weight in a step. Measured over 6 steps on CPU ranks in bf16, 6 models that were not
# used to choose it, two seeds, learning rates 1e-4 and 1e-5: at most 9e-4 between rungs and cuts of the batch, at least
# 8.5e-2 for a learning rate that is a tenth wrong, and 4.2e-2 for a twentieth.
UPDATE_TOLERANCE = 0.03
# Relative. Measured on CPU ranks, five models, all stages and cuts of the batch: at most 5e-4 in bf16, 2e-6 in fp32.
# The faults of releases (configs/deepspeed/faults.toml) were 0.66 and more.
GRADIENT_TOLERANCE = 0.05
_FIRST_NORMS = 3  # later ones come from weights that rounding has moved apart
FEWEST_UPDATES = 3  # differences add up from update to update; the first loss comes before all of them
_TINY = 1e-12  # a loss of 0 has no relative difference
_SAME_WEIGHTS = 1e-9  # relative: their sum in another order

# own: each config has its own micro batch, and the samples of a step are the winner's.
# alike: both have the micro batch at which the reference is known to fit, because a script deals out samples by it.
# few: both have the smallest one, because their steps take long, and at most two of them a step.
Batches = Literal["own", "alike", "few"]


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
    winner: Trial,
    plain: Trial,
    run: Callable[[Trial], Fit | str],
    *,
    steps: Steps,
    tolerance: float,
    batches: tuple[Knobs, Knobs],
) -> ParityResult:
    """Run both configs on the same samples, and find the knob that changes the losses where these differ.

    Nothing is run when the two differ in the batch only: the cut into micro batches does not change the maths.
    `batches` has the knobs of both as `choose_batches` returns them: their micro batch and accumulation count. `run`
    returns a fit with losses, or the reason that there are none.
    """
    if is_same_maths(winner, plain):
        return ParityResult()
    ours, theirs = batches

    def run_parity(config: Trial, batch: Knobs) -> Fit | str:
        knobs = replace(config.knobs, micro_batch=batch.micro_batch, accumulation=batch.accumulation)
        return run(replace(config, knobs=knobs, purpose="certify", exam="parity", steps=steps, repeat=0))

    unchecked = "parity was not checked"
    if isinstance(fit := run_parity(winner, ours), str):
        return ParityResult(not_checked=f"{unchecked}: {winner.rung} {fit}")
    if isinstance(reference := run_parity(plain, theirs), str):
        return ParityResult(not_checked=f"{unchecked}: {plain.rung}, the reference, {reference}")
    if why := why_not_comparable(fit, reference):
        return ParityResult(not_checked=f"{unchecked}: {why}")
    if (updates := min(len(fit.losses), len(reference.losses)) - 1) < FEWEST_UPDATES:
        why = f"the losses show {max(0, updates)} updates of the weights, and {FEWEST_UPDATES} are needed"
        return ParityResult(not_checked=f"{unchecked}: {why}")
    if not any(map(math.isfinite, reference.losses)):
        return ParityResult(not_checked=f"{unchecked}: no loss of {plain.rung}, the reference, is finite")
    if reference.update_size == 0 == fit.update_size:
        return ParityResult(not_checked=f"{unchecked}: no step changed a weight (is the learning rate 0 at first?)")
    parity = compare_fits(fit, reference, tolerance=tolerance, rung=plain.rung)
    if parity.within:
        return ParityResult(parity=parity)

    # Set back one knob at a time: those that bring both within their tolerances changed the maths.
    culprits: list[tuple[Parity, str, Trial]] = []
    unknown: list[str] = []
    for name in differing_knobs(winner.knobs, plain.knobs):
        config = replace(winner, knobs=with_knob_of(winner.knobs, plain.knobs, name))
        if isinstance(fit := run_parity(config, ours), str):
            unknown.append(f"with {name} set back it {fit}")
        elif (mended := compare_fits(fit, reference, tolerance=tolerance, rung=plain.rung)).within:
            culprits.append((mended, name, config))
    difference = describe_difference(parity)
    if not culprits:
        why = "; ".join(unknown) or f"{winner.rung} itself or a combination of its knobs changes the maths"
        return ParityResult(parity=parity, failure=f"{difference}: {why}")
    mended, name, config = min(culprits, key=lambda item: item[0].largest_difference)
    names = tuple(name for _, name, _ in culprits)
    plain_value, winning_value = (_show(trial.knobs, name) for trial in (plain, winner))
    return ParityResult(
        parity=replace(parity, changed_by=names),
        taken_back=config,
        without=replace(mended, changed_by=names, taken_back=name),
        changed=f"{name} taken back to {plain_value}: with {winning_value} {difference}",
        failure=f"{difference}: changed by {', '.join(names)}",
    )


def compare_fits(fit: Fit, reference: Fit, *, tolerance: float, rung: str) -> Parity:
    """Compare losses step by step, sizes of updates, and the first gradient norms with the reference's.

    That is a config of `rung`.
    """
    apart, updates_apart, gradients_apart = largest_difference(fit.losses, reference.losses), None, None
    if fit.update_size is not None and reference.update_size is not None:
        updates_apart = largest_difference([fit.update_size], [reference.update_size])
    if fit.gradient_norms and reference.gradient_norms:
        first, expected = (each.gradient_norms[:_FIRST_NORMS] for each in (fit, reference))
        gradients_apart = largest_difference(first, expected)
    return Parity(
        reference=rung,
        steps=min(len(fit.losses), len(reference.losses)),
        tolerance=tolerance,
        largest_difference=apart,
        update_difference=updates_apart,
        update_tolerance=UPDATE_TOLERANCE,
        gradient_difference=gradients_apart,
        gradient_tolerance=GRADIENT_TOLERANCE,
        within=apart <= tolerance
        and (updates_apart is None or updates_apart <= UPDATE_TOLERANCE)
        and (gradients_apart is None or gradients_apart <= GRADIENT_TOLERANCE),
    )


def describe_difference(parity: Parity) -> str:
    """'losses differ by 5 % from ddp's, tolerance 1 %', and so for updates and gradients that differ too much."""
    sentences = []
    for values, apart, tolerance in (
        ("losses", parity.largest_difference, parity.tolerance),
        ("updates of the weights", parity.update_difference, UPDATE_TOLERANCE),
        ("gradient norms", parity.gradient_difference, GRADIENT_TOLERANCE),
    ):
        if apart is not None and apart > tolerance:
            sentences.append(
                f"{values} differ by {_share(apart)} from {parity.reference}'s, tolerance {_share(tolerance)}"
            )
    return " and ".join(sentences)


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
    settings = {key: value for key, value in knobs.settings.items() if key != name}
    if name in plain.settings:
        settings[name] = plain.settings[name]
    return replace(knobs, settings=settings)


def choose_batches(winner: Knobs, plain: Knobs, batches: Batches, smallest: int) -> tuple[Knobs, Knobs]:
    """The winner and the plain config with the batches on which their losses are compared.

    `smallest` is the smallest micro batch with which the model is known to train.
    """
    match batches:
        case "few":
            theirs = replace(plain, micro_batch=smallest, accumulation=min(winner.accumulation, 2))
        case "alike" if winner.accumulation == plain.accumulation:
            # A script may have no argument for accumulation, or one that its config fixes.
            theirs = replace(plain, micro_batch=min(plain.micro_batch, winner.micro_batch))
        case _:
            theirs = same_samples(plain, winner)
    if batches == "own":
        return winner, theirs
    return replace(winner, micro_batch=theirs.micro_batch, accumulation=theirs.accumulation), theirs


def same_samples(plain: Knobs, winner: Knobs) -> Knobs:
    """The plain config on as many samples as the winner, at the largest divisor up to its micro batch."""
    samples = winner.micro_batch * winner.accumulation
    size = max(size for size in range(1, min(plain.micro_batch, samples) + 1) if samples % size == 0)
    return replace(plain, micro_batch=size, accumulation=samples // size)


def why_not_comparable(first: Fit, second: Fit) -> str | None:
    """The reason that the losses of two trials of a script cannot be compared; None when they can, or for no script."""
    trained, expected = first.trained, second.trained
    if trained is None and expected is None:
        return None
    if trained is None or expected is None or trained.samples is None or expected.samples is None:
        return "the samples of the script were not seen"
    if first.skipped_steps != second.skipped_steps:
        skipped = f"{first.skipped_steps} and {second.skipped_steps}"
        return f"fp16 gradients overflowed in {skipped} steps, so the updates come from other samples"
    if trained.samples != expected.samples:
        return "the script draws other samples in each run (has it a seed, for shuffling, too?)"
    if trained.weights is None or expected.weights is None:
        return "the weights with which it begins were not seen"
    if abs(trained.weights - expected.weights) > _SAME_WEIGHTS * max(abs(expected.weights), _TINY):
        return "the script begins with other weights under each config"
    return None


def largest_difference(losses: Sequence[float], plain: Sequence[float]) -> float:
    """The largest relative difference of two losses of a step; infinite where only one of them is finite."""

    def differ(loss: float, expected: float) -> float:
        if math.isfinite(loss) and math.isfinite(expected):
            return abs(loss - expected) / max(abs(expected), _TINY)
        return 0.0 if math.isfinite(loss) == math.isfinite(expected) else math.inf

    return max(map(differ, losses, plain), default=math.inf)


def _share(value: float) -> str:
    """0.0041 → '0.41 %'."""
    if not math.isfinite(value):
        return "more than any share (a loss is not finite)"
    return f"{100 * value:.2g} %" if value < 1 else f"{100 * value:.0f} %"


def _show(knobs: Knobs, name: str) -> str:
    value = knobs.checkpointing if name == CHECKPOINTING else knobs.settings.get(name, "its default")
    return str(value).lower() if isinstance(value, bool) else str(value)
