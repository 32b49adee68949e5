"""The certificate on the terminal: what was proven of the winner, part by part, and what was not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text

from ..outcomes import TIERS
from ..units import show_bytes
from . import words

Certificate = Mapping[str, Any]  # "certificate" of report.json, see `search.certificate.Certificate`


def headline(certificate: Certificate) -> Text:
    """'Certificate: passed'."""
    if certificate.get("passed"):
        return Text.assemble(("\nCertificate: ", "bold"), ("passed", "bold green"))
    failed = bool(certificate.get("failures"))
    said = "not passed" if failed else "incomplete, what was checked holds"
    return Text.assemble(("\nCertificate: ", "bold"), (said, "bold red" if failed else "bold yellow"))


def lines_of(certificate: Certificate) -> Iterator[tuple[str, Text]]:
    """Names and what is said of them; a part that was never reached is left out."""
    if shape := certificate.get("batch_shape"):
        yield "longest batch", Text(_batch(shape, certificate.get("draws") or 0))
    if steps := certificate.get("optimizer_steps"):
        yield "steps", Text(_steps(steps, certificate.get("alloc_retries")))
    if certificate.get("evaluated"):
        yield "evaluation", Text("fits")
    if checkpoint := certificate.get("checkpoint"):
        yield "checkpoint", Text(", ".join(_checkpoint(checkpoint)))
    if headroom := certificate.get("headroom_bytes"):
        yield "headroom", Text(_headroom(headroom, certificate.get("headroom_kept")))
    if parity := certificate.get("parity"):
        yield "parity", Text(_parity(parity), style="" if parity["within"] else "red")
    for name, key, style in (
        ("backed off", "backed_off", "yellow"),
        ("failed", "failures", "red"),
        ("not checked", "not_checked", "yellow"),
    ):
        for number, sentence in enumerate(certificate.get(key) or ()):
            yield "" if number else name, Text(sentence, style=style)


def _batch(shape: tuple[int, ...], draws: int) -> str:
    sizes = " × ".join(f"{size:,}" for size in shape)
    return (
        f"{sizes}, the longest of {draws:,} draws" if draws else f"{sizes}, by the workload's own build_longest_batch"
    )


def _steps(steps: int, retries: int | None) -> str:
    said = f"{steps} optimizer step{'s' if steps > 1 else ''}"
    if retries is None:
        return said
    return f"{said}, the allocator ran full {retries} times" if retries else f"{said} without an allocation retry"


def _checkpoint(checkpoint: Mapping[str, Any]) -> Iterator[str]:
    size, save_s, load_s = checkpoint.get("bytes"), checkpoint.get("save_s"), checkpoint.get("load_s")
    saved = "saved" if size is None else f"{show_bytes(size)} saved"
    yield saved if save_s is None else f"{saved} in {words.of_seconds(save_s)}"
    if load_s is not None:
        yield f"loaded in {words.of_seconds(load_s)}"
    if (restored := checkpoint.get("restored")) is not None:
        yield "evaluates to the same loss" if restored else "evaluates to another loss"
    if (gathered := checkpoint.get("gathered")) is not None:
        yield "whole weights gathered" if gathered else "whole weights not gathered"


def _headroom(headroom: Mapping[str, int], kept: bool | None) -> str:
    free = ", ".join(f"{tier} {show_bytes(headroom[tier])}" for tier in TIERS if tier in headroom)
    return f"{free} (less than the share of the device that the search leaves free)" if kept is False else free


def _parity(parity: Mapping[str, Any]) -> str:
    apart, reference, steps = parity.get("largest_difference"), parity["reference"], parity["steps"]
    over = f"over {steps} step{'s' if steps != 1 else ''}, tolerance {_share(parity['tolerance'])}"
    if apart is None or apart == float("inf"):  # JSON has no infinity
        said = f"a loss is not finite where {reference}'s is, {over}"
    elif parity["within"]:
        said = f"losses within {_share(apart)} of {reference}'s {over}"
    else:
        said = f"losses differ by {_share(apart)} from {reference}'s {over}"
    changed, taken_back = ", ".join(parity.get("changed_by") or ()), parity.get("taken_back")
    if taken_back:
        return f"{said}, since {taken_back}, which changed them, was taken back"
    return f"{said}; changed by {changed}" if changed else said


def _share(value: float) -> str:
    """0.0041 → '0.41 %'."""
    return f"{words.of_rate(100 * value)} %" if value else "0 %"
