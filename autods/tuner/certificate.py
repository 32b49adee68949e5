"""The certificate of a winner as values: from the records of its exams to "certificate" in report.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..types import Examined, Failed, Fit, Phase, Record, Steps, Tier, TierUse, first_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint of the whole engine; a part that was not done is None. See `types.Examined`."""

    bytes: int | None
    save_s: float | None
    load_s: float | None
    gathered: bool | None
    restored: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """The losses compared with a plain config's on the same samples, step by step.

    `reference` is the plain config's rung.
    `largest_difference` is relative; infinite when only one of two losses is finite.
    `changed_by` are the knobs that changed the losses; setting back any of them is enough.
    `taken_back` is the one that was set back. The difference is then that of the config without it.
    """

    reference: str
    steps: int
    tolerance: float
    largest_difference: float
    within: bool
    changed_by: tuple[str, ...] = ()
    taken_back: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The result of all checks. `passed` means that everything was checked and nothing failed.

    `batch_shape` is the shape of the longest batch's largest tensor; empty when no such batch ran to its end.
    `draws` is the number of batches that it is the longest of; 0 when the workload names its longest batch.
    `headroom_bytes` is limit less peak, for each tier with a limit.
    `headroom_kept` tells whether the longest batch left the search's headroom free on the device.
    `backed_off`, `failures` and `not_checked` are sentences.
    """

    passed: bool
    batch_shape: tuple[int, ...] = ()
    draws: int = 0
    optimizer_steps: int = 0
    evaluated: bool = False
    checkpoint: Checkpoint | None = None
    alloc_retries: int | None = None
    headroom_bytes: Mapping[Tier, int] = field(default_factory=dict)
    headroom_kept: bool | None = None
    parity: Parity | None = None
    backed_off: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()


def certificate_to_json(certificate: Certificate) -> dict[str, Any]:
    """Plain values for "certificate" of report.json."""
    return asdict(certificate)


def certificate_of_exam(exam: Record, *, limit_bytes: int, usable_bytes: float) -> Certificate:
    """The certificate of an exam that did not lack memory, without the comparison of losses."""
    match exam.outcome:
        case Fit() as fit:
            certificate = _certificate_of_fit(fit, limit_bytes, usable_bytes)
        case Failed() as failure:
            certificate = _certificate_of_failure(failure, exam.trial.steps)
        case short:
            certificate = Certificate(passed=False, failures=(f"the longest batch ran out of {short.tier} memory",))
    return with_verdict(certificate)


def with_verdict(certificate: Certificate) -> Certificate:
    """The certificate with `passed` computed from its parts."""
    return replace(certificate, passed=not (certificate.failures or certificate.not_checked))


def _certificate_of_fit(fit: Fit, limit_bytes: int, usable_bytes: float) -> Certificate:
    limits = {tier: limit for tier, use in fit.memory.items() if (limit := _limit(tier, use, limit_bytes)) is not None}
    certificate = Certificate(
        passed=False,
        optimizer_steps=len(fit.losses),
        alloc_retries=fit.alloc_retries,
        headroom_bytes={tier: limit - fit.memory[tier].peak_bytes for tier, limit in limits.items()},
        headroom_kept=fit.device_peak_bytes <= usable_bytes,
    )
    examined = fit.examined
    if examined is None:
        reason = "the longest batch, evaluation and the checkpoint were not checked: the trial ran its steps only"
        return replace(certificate, not_checked=(reason,))
    saved = Checkpoint(
        bytes=examined.checkpoint_bytes,
        save_s=examined.save_s,
        load_s=examined.load_s,
        gathered=examined.gathered,
        restored=examined.restored,
    )
    mismatch = "the loaded checkpoint does not evaluate to the loss of the saved one"
    return replace(
        certificate,
        batch_shape=examined.batch_shape,
        draws=examined.draws,
        evaluated=examined.evaluated,
        checkpoint=None if examined.save_s is None else saved,
        failures=(mismatch,) if examined.restored is False else (),
        not_checked=examined.left_out or tuple(_left_out(examined)),
    )


def _limit(tier: Tier, use: TierUse, device_bytes: int) -> int | None:
    return device_bytes if tier == "device" and use.limit_bytes is None else use.limit_bytes


def _left_out(examined: Examined) -> Iterator[str]:
    """A sentence for each part that was not done."""
    if not examined.evaluated:
        yield "evaluation was not run"
    if examined.save_s is None:
        yield "no checkpoint was saved"
    elif examined.load_s is None:
        yield "the checkpoint was not loaded"
    elif examined.restored is None:
        yield "the loss after loading the checkpoint was not compared"
    if examined.gathered is False:
        yield "the whole weights were not gathered"


# Phase → the part that failed, and the parts that were not reached.
_AFTER_THE_STEPS: Mapping[Phase, tuple[str, tuple[str, ...]]] = {
    "evaluate": ("evaluation", ("no checkpoint was saved",)),
    "save": ("saving the checkpoint", ("no checkpoint was loaded",)),
    "load": ("loading the checkpoint", ()),
}
_ALL: tuple[str, Sequence[str]] = ("the longest batch", ("evaluation was not run", "no checkpoint was saved"))


def _certificate_of_failure(failure: Failed, steps: Steps) -> Certificate:
    """The certificate of an exam that failed for another reason than memory: earlier parts were done."""
    part, unreached = _AFTER_THE_STEPS.get(failure.phase, _ALL)
    place = f"rank {failure.rank}, {failure.phase}" if failure.rank >= 0 else failure.phase
    advice = f"; {first_line(failure.advice)}" if failure.advice else ""
    return Certificate(
        passed=False,
        optimizer_steps=steps.warmup + steps.timed if failure.phase in _AFTER_THE_STEPS else 0,
        evaluated=failure.phase in ("save", "load"),
        failures=(f"{part} failed ({place}): {first_line(failure.evidence)}{advice}",),
        not_checked=tuple(unreached),
    )
