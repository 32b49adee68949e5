"""What to do about a rung whose limit lies within its interval: how the allocator would get along there."""

from __future__ import annotations

from ..units import show_bytes
from .caching import replay, squeezed
from .values import ForecastPhase, Trace

PHASE_WORDS: dict[ForecastPhase, str] = {
    "init": "building and initialising",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "step": "the optimizer step",
}
_WORTH_SAYING = 0.02  # of the limit


def advice_for(trace: Trace, *, limit_bytes: int, least_bytes: int, expandable: bool) -> str | None:
    """Half a sentence for a limit of the allocator below the least at which the trace runs well; None: nothing new."""
    if not expandable:
        other, _ = squeezed(trace, replay(trace, expandable=True), expandable=True)
        if other <= limit_bytes and least_bytes - other > _WORTH_SAYING * limit_bytes:
            return f"PYTORCH_ALLOC_CONF=expandable_segments:True would save {show_bytes(least_bytes - other)}"
    tried = replay(trace, expandable=expandable, limit_bytes=limit_bytes)
    if tried.ran_out is not None:
        wanted = show_bytes(tried.ran_out.wanted_bytes)
        return f"{PHASE_WORDS[tried.ran_out.phase]} would find no {wanted} in one piece"
    if tried.late_retries:
        return "it would do by giving cached memory back in every step, which is slow"
    return None
