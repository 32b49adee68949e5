"""A rung with something else than its usual knobs: without checkpointing, in another precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..values import Knobs, Scalar
from .candidates import Candidate

_HALVES = ("bf16", "fp16")


def without_checkpointing(candidate: Candidate) -> Candidate:
    """Its activations are kept instead of recomputed: less arithmetic, more memory."""
    return replace(candidate, knobs=replace(candidate.knobs, checkpointing=False), stand_in=False)


def in_precision(candidate: Candidate, precision: str) -> Candidate:
    """The same in bf16, fp16 or fp32, whatever the base config says."""
    said: dict[str, Scalar] = {f"{half}.enabled": half == precision for half in _HALVES}
    settings = {**candidate.knobs.settings, **said}
    return replace(candidate, knobs=replace(candidate.knobs, settings=settings), stand_in=False)


def name_of(rung: str, knobs: Knobs, *, recomputes: bool) -> str:
    """What people read: the rung, and what is unusual. recomputes: the model can recompute its activations."""
    return f"{rung} {unusual(knobs, recomputes=recomputes or knobs.checkpointing)}".rstrip()


def unusual(knobs: Knobs, *, recomputes: bool) -> str:
    """'in fp16', 'without checkpointing', both or nothing; 'recomputing' where the usual trials do not."""
    precision = _precision(knobs.settings)
    said = [f"in {precision}"] if precision else []
    if knobs.checkpointing is not recomputes:
        said.append("recomputing" if knobs.checkpointing else "without checkpointing")
    return " ".join(said)


def _precision(settings: Mapping[str, Scalar]) -> str | None:
    """What its settings say, if they say anything."""
    if not any(f"{half}.enabled" in settings for half in _HALVES):
        return None
    return next((half for half in _HALVES if settings.get(f"{half}.enabled")), "fp32")
