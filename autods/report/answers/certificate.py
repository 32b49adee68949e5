"""The certificate of a fit in a document: its verdict, and each check with its result."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...types import TIERS
from ...units import format_bytes
from ..document import Words, line
from ..results.fit import Certificate, CheckpointProof, Parity
from ..text import format_number_of, format_seconds, format_share


def describe_trust(certificate: Certificate) -> Words:
    """'Certified.', or that something failed or was not checked."""
    if certificate.passed:
        return line(("Certified.", "green"))
    return line(("Certificate not passed.", "red") if certificate.failures else ("Certificate incomplete.", "yellow"))


def describe_proof(certificate: Certificate) -> Words:
    """'certificate passed', or the first thing that failed or was not checked."""
    if certificate.passed:
        return line(("certificate passed", "green"))
    if certificate.failures:
        return line((f"certificate not passed: {certificate.failures[0]}", "red"))
    return line((f"certificate incomplete: {', '.join(certificate.not_checked[:1])}", "yellow"))


def describe_verdict(certificate: Certificate) -> Words:
    """'Certificate: passed'."""
    verdict = ("incomplete, what was checked holds", "bold yellow")
    if certificate.passed:
        verdict = ("passed", "bold green")
    elif certificate.failures:
        verdict = ("not passed", "bold red")
    return line(("Certificate: ", "bold"), verdict)


def list_checks(certificate: Certificate) -> Iterator[tuple[str, Words]]:
    """The checks by name, each with its result; a check that was never reached is left out."""
    if shape := certificate.batch_shape:
        origin = "by the workload's own build_longest_batch"
        if certificate.draws:
            origin = f"the longest of {format_number_of(certificate.draws, 'draw')}"
        yield "longest batch", f"{' × '.join(f'{size:,}' for size in shape)}, {origin}"
    if steps := certificate.optimizer_steps:
        retries = certificate.alloc_retries
        full = " without an allocation retry"
        if retries:
            full = f", the allocator ran full {format_number_of(retries, 'time')}"
        level = ", memory does not grow" if certificate.growth_bytes == 0 else ""
        skips = f", {certificate.skipped_steps} more skipped as fp16 overflowed" if certificate.skipped_steps else ""
        yield "steps", format_number_of(steps, "optimizer step") + ("" if retries is None else full) + level + skips
    if certificate.evaluated:
        yield "evaluation", "fits"
    if checkpoint := certificate.checkpoint:
        yield "checkpoint", ", ".join(_checkpoint(checkpoint))
    if headroom := certificate.headroom_bytes:
        free = ", ".join(f"{tier} {format_bytes(headroom[tier])}" for tier in TIERS if tier in headroom)
        small = " (less than the share of the device that the search leaves free)"
        yield "headroom", free + (small if certificate.headroom_kept is False else "")
    if parity := certificate.parity:
        yield "parity", line((_parity(parity), "" if parity.within else "red"))
    for name, sentences, style in (
        ("backed off", certificate.backed_off, "yellow"),
        ("failed", certificate.failures, "red"),
        ("not checked", certificate.not_checked, "yellow"),
    ):
        for number, sentence in enumerate(sentences):
            yield "" if number else name, line((sentence, style))


def _checkpoint(checkpoint: CheckpointProof) -> Iterator[str]:
    size, save_s, load_s = checkpoint.bytes, checkpoint.save_s, checkpoint.load_s
    saved = "saved" if size is None else f"{format_bytes(size)} saved"
    yield saved if save_s is None else f"{saved} in {format_seconds(save_s)}"
    if load_s is not None:
        yield f"loaded in {format_seconds(load_s)}"
    if (restored := checkpoint.restored) is not None:
        yield f"evaluates to {'the same' if restored else 'another'} loss"
    if (gathered := checkpoint.gathered) is not None:
        yield f"whole weights {'' if gathered else 'not '}gathered"


def _parity(parity: Parity) -> str:
    difference, reference = parity.largest_difference, parity.reference
    if math.isinf(difference):
        result = f"a loss is not finite where {reference}'s is,"
    else:
        result = f"losses {_apart(difference, parity.tolerance)} {reference}'s"
    result += f" over {format_number_of(parity.steps, 'step')}, tolerance {format_share(parity.tolerance)}"
    for values, apart, tolerance in (
        ("updates", parity.update_difference, parity.update_tolerance),
        ("gradient norms", parity.gradient_difference, parity.gradient_tolerance),
    ):
        if apart is not None and tolerance is not None:
            infinite = f"are not finite where {reference}'s are"
            compared = infinite if math.isinf(apart) else f"{_apart(apart, tolerance)} {reference}'s"
            result += f"; {values} {compared}, tolerance {format_share(tolerance)}"
    if parity.taken_back:
        return f"{result}, since {parity.taken_back}, which changed them, was taken back"
    return f"{result}; changed by {', '.join(parity.changed_by)}" if parity.changed_by else result


def _apart(difference: float, tolerance: float) -> str:
    """'within 0.2 % of' or 'differ by 3 % from'."""
    share = format_share(difference)
    return f"within {share} of" if difference <= tolerance else f"differ by {share} from"
