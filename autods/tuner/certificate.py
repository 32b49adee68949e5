"""From the record of an exam to the certificate of the winner."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ..report.results.fit import Certificate, CheckpointProof
from ..report.text import format_number_of
from ..types import Failed, Fit, Knobs, Outcome, OutOfMemory, Phase, Record, first_line, is_machines_fault
from ..units import format_bytes


def certificate_of_exam(exam: Record, *, limit_bytes: int, usable_bytes: float) -> Certificate:
    """The certificate of an exam that did not lack memory, without the comparison of losses and `passed`."""
    match exam.outcome:
        case Fit() as fit:
            return _certificate_of_fit(fit, limit_bytes, usable_bytes, exam.trial.knobs)
        case OutOfMemory() as out:
            return Certificate(failures=(f"the longest batch ran out of {out.lacked}",))
        case Failed() as failure:  # the parts before it were done
            steps, is_after = exam.trial.steps, failure.phase in _AFTER_THE_STEPS
            part, unreached = _AFTER_THE_STEPS.get(failure.phase, _ALL)
            place = f"rank {failure.rank}, {failure.phase}" if failure.rank >= 0 else failure.phase
            advice = f"; {first_line(failure.advice)}" if failure.advice else ""
            return Certificate(
                optimizer_steps=steps.warmup + steps.timed if is_after else 0,
                evaluated=failure.phase in ("save", "load"),
                failures=(f"{part} failed ({place}): {first_line(failure.evidence)}{advice}",),
                not_checked=unreached,
            )


# Phase → the part that failed, and the parts that were not reached.
_AFTER_THE_STEPS: Mapping[Phase, tuple[str, tuple[str, ...]]] = {
    "evaluate": ("evaluation", ("no checkpoint was saved",)),
    "save": ("saving the checkpoint", ("no checkpoint was loaded",)),
    "load": ("loading the checkpoint", ()),
}
_ALL = ("the longest batch", ("evaluation was not run", "no checkpoint was saved"))


def _certificate_of_fit(fit: Fit, limit_bytes: int, usable_bytes: float, knobs: Knobs) -> Certificate:
    limits = {tier: use.limit_bytes for tier, use in fit.memory.items()}
    if "device" in limits:
        own_bytes = None if knobs.keeps_headroom else limits["device"]
        limits["device"] = own_bytes or limit_bytes
    certificate = Certificate(
        optimizer_steps=len(fit.losses),
        skipped_steps=fit.skipped_steps,
        alloc_retries=fit.alloc_retries,
        headroom_bytes={
            tier: limit - (fit.device_peak_bytes if tier == "device" else fit.memory[tier].peak_bytes)
            for tier, limit in limits.items()
            if limit is not None
        },
        headroom_kept=fit.is_within(usable_bytes, knobs),
    )
    examined = fit.examined
    if examined is None:
        reason = "the longest batch, evaluation and the checkpoint were not checked: the trial ran its steps only"
        return replace(certificate, not_checked=(reason,))
    missing = {
        "evaluation was not run": not examined.evaluated,
        "no checkpoint was saved": examined.save_s is None,
        "the checkpoint was not loaded": examined.save_s is not None and examined.load_s is None,
        "the loss after loading the checkpoint was not compared": examined.load_s is not None
        and examined.restored is None,
        "the whole weights were not gathered": examined.gathered is False,
    }
    saved = CheckpointProof(
        bytes=examined.checkpoint_bytes,
        save_s=examined.save_s,
        load_s=examined.load_s,
        gathered=examined.gathered,
        restored=examined.restored,
    )
    failures = []
    runs_out_after_steps = None
    if growth := examined.growth_bytes:
        runs_out_after_steps = len(fit.losses) + max(0, certificate.headroom_bytes.get("device", 0)) // growth
        failures.append(
            f"a step holds {format_bytes(growth)} more of the device's memory than the one before:"
            f" it will run out after about {runs_out_after_steps:,} steps"
        )
    if examined.restored is False:
        failures.append("the loaded checkpoint does not evaluate to the loss of the saved one")
    return replace(
        certificate,
        batch_shape=examined.batch_shape,
        draws=examined.draws,
        evaluated=examined.evaluated,
        checkpoint=None if examined.save_s is None else saved,
        growth_bytes=examined.growth_bytes,
        runs_out_after_steps=runs_out_after_steps,
        failures=tuple(failures),
        not_checked=examined.left_out or tuple(sentence for sentence, is_missing in missing.items() if is_missing),
    )


# Phases whose device memory grows with the micro batch. That of building, saving and loading does not.
_BATCH_PHASES: tuple[Phase, ...] = ("forward", "backward", "step", "evaluate")


def lacks_device_memory(record: Record, limit_bytes: int) -> bool:
    """Whether memory ran out, the peak exceeds the limit, or the allocator had to flush its cache in the headroom."""
    outcome = record.outcome
    if isinstance(outcome, Fit):
        return not outcome.leaves_headroom(limit_bytes, record.trial.knobs)
    return isinstance(outcome, OutOfMemory) and not is_machines_fault(outcome)


def grows_with_batch(outcome: Outcome) -> bool:
    """Whether a smaller micro batch can help."""
    if isinstance(outcome, OutOfMemory):
        return outcome.tier == "device" and outcome.phase in _BATCH_PHASES
    return isinstance(outcome, Fit)


def describe_exam(outcome: Outcome, limit_bytes: float = math.inf) -> str:
    """The outcome as the end of a sentence: "ran out of device memory in backward"."""
    match outcome:
        case Fit() as fit if fit.device_peak_bytes > limit_bytes:
            return f"needs {format_bytes(fit.device_peak_bytes)} of {format_bytes(limit_bytes)}"
        case Fit(alloc_retries=int(retries)) if retries:
            return f"fits, but its allocator ran full {format_number_of(retries, 'time')} in the steps"
        case Fit():
            return "fits"
        case OutOfMemory() as out:
            lacking = f", at least {format_bytes(out.missing_bytes)} short" if out.missing_bytes else ""
            return f"ran out of {out.lacked} in {out.phase}{lacking}"
        case Failed() as failure:
            return f"failed in {failure.phase}: {first_line(failure.evidence)}"
