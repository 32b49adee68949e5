"""A diagnosis, and the sizes in an allocator's error message."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from ..types import Action, FailureKind, Tier
from ..units import format_bytes, parse_bytes

Kind = Literal["out_of_memory", "none"] | FailureKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Why a run died, or that it did not.

    `kind` is `none` when nothing failed, and `unknown` when the evidence does not show the cause.
    `tier` is where memory ran out or was short. `rank` is the global rank that failed first by itself, if it is known.
    `phase` is load, init, data, forward, backward, step, checkpoint or evaluation. `confidence` is between 0 and 1.
    `evidence` are lines that prove it, the most telling first. `places` has the file and line of the first of them.
    `signature` is the row of `signatures/` that decided.
    `notes` are further facts, such as fragmentation or another process.
    """

    kind: Kind
    tier: Tier | None = None
    rank: int | None = None
    phase: str | None = None
    confidence: float
    evidence: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    action: Action
    advice: str
    notes: tuple[str, ...] = ()
    signature: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `autods diagnose --json` prints them."""
        return {name: _plain(getattr(self, name)) for name in self.__dataclass_fields__}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


_SIZE = r"([\d.]+ ?[KMGT]?i?B)"
_WANTED = re.compile(r"tried to allocate (\d+) bytes|tried to allocate " + _SIZE, re.IGNORECASE)
_FREE = re.compile(r"of which " + _SIZE + r" is free|; " + _SIZE + r" free", re.IGNORECASE)
_IDLE = re.compile(_SIZE + r" is reserved by PyTorch but unallocated", re.IGNORECASE)
_ALLOCATED = re.compile(_SIZE + r" already allocated", re.IGNORECASE)
_RESERVED = re.compile(_SIZE + r" reserved in total", re.IGNORECASE)
_OTHERS = re.compile(r"(?<!this )process \d+ has " + _SIZE + r" memory in use", re.IGNORECASE)
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Sizes in an out-of-memory message; None where the message does not have them."""

    wanted_bytes: int | None = None
    free_bytes: int | None = None
    idle_bytes: int | None = None  # reserved by the allocator, holding no tensor
    others_bytes: int | None = None  # of other processes on the same card

    @property
    def fragmented(self) -> bool:
        """Whether the allocator held enough free memory, but in pieces."""
        return bool(self.wanted_bytes and self.idle_bytes and self.idle_bytes >= self.wanted_bytes)

    def notes(self) -> tuple[str, ...]:
        """Sentences on fragmentation and on other processes."""
        sentences = []
        if self.fragmented:
            assert self.idle_bytes is not None
            sentences.append(
                f"fragmentation: {format_bytes(self.idle_bytes)} reserved but unallocated: set {EXPANDABLE}"
            )
        if self.others_bytes and self.others_bytes > 2**30:
            sentences.append(
                f"other processes hold {format_bytes(self.others_bytes)} of this card: end them first (nvidia-smi)"
            )
        return tuple(sentences)


def parse_shortage(text: str) -> Shortage:
    """Return the sizes in one message."""
    idle = _bytes(_IDLE, text)
    allocated, reserved = _bytes(_ALLOCATED, text), _bytes(_RESERVED, text)
    if idle is None and allocated is not None and reserved is not None:
        idle = max(0, reserved - allocated)
    # Without "this process has", a lone "Process 4121 has" may be this process, seen from inside a container.
    tells_apart = "this process has" in text.lower()
    others = [size for match in _OTHERS.finditer(text) if tells_apart and (size := _size(match[1])) is not None]
    return Shortage(
        wanted_bytes=_bytes(_WANTED, text), free_bytes=_bytes(_FREE, text), idle_bytes=idle,
        others_bytes=sum(others) if others else None,
    )  # fmt: skip


def _bytes(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    return _size(next(group for group in match.groups() if group)) if match else None


def _size(text: str) -> int | None:
    try:
        return parse_bytes(text)
    except ValueError:
        return None
