"""What a card's memory is made of, as a bar. Each kind has a sign of its own, so that it reads without colour, too."""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text

from ..forecast.values import RungForecast

_KINDS: Mapping[str, tuple[str, str]] = {
    "parameters": ("█", "blue"),
    "gradients": ("▓", "magenta"),
    "optimizer": ("▒", "cyan"),
    "activations": ("░", "green"),
    "buckets": ("▪", "yellow"),
    "other": ("·", "white"),
}
_WIDTH = 20
_LIMIT = "│"
_BEYOND = "▶"


def bar(rung: RungForecast, scale: int) -> Text:
    """20 signs are the card's `scale` bytes; what lies beyond is cut, with a sign that says so."""
    device = rung.memory.get("device")
    if device is None or not scale:
        return Text()
    text = Text()
    drawn, upto = 0, 0.0
    for kind, size in shares(rung).items():
        sign, style = _KINDS[kind]
        upto += size * _WIDTH / scale
        count = min(round(upto), _WIDTH) - drawn
        text.append(sign * count, style=style)
        drawn += count
    text.append(" " * (_WIDTH - drawn))
    return text.append(_BEYOND, style="red") if device.peak_bytes > scale else text.append(_LIMIT, style="dim")


def shares(rung: RungForecast) -> Mapping[str, int]:
    """Bytes by kind; what the peak holds beyond the tensors (the allocator, the context) is `other`."""
    device = rung.memory["device"]
    known = {kind: rung.breakdown.get(kind, 0) for kind in _KINDS if kind != "other"}
    return {**known, "other": max(0, device.peak_bytes - sum(known.values()))}


def legend() -> Text:
    """'█ parameters  ▓ gradients …'."""
    parts = [Text.assemble((sign, style), f" {kind}") for kind, (sign, style) in _KINDS.items()]
    return Text("  ").join(parts)
