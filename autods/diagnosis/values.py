"""A diagnosis, and the sizes that an allocator names in its error."""

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

    kind: `none` when nothing failed, `unknown` when something did and the evidence does not say why.
    tier: where memory ran out or was short. rank: the global rank that failed first by itself, if that can be known.
    phase: what it was doing: load, init, data, forward, backward, step, checkpoint, evaluation.
    confidence: 0 to 1. evidence: the lines that prove it, the most telling first; `places` has file:line of each.
    signature: the row of `signatures/` that decided. notes: what else is worth knowing (fragmentation, a co-tenant).
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
        """As `autods diagnose --json` prints it."""
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
    """Bytes, each None where the text does not say."""

    wanted_bytes: int | None = None
    free_bytes: int | None = None
    idle_bytes: int | None = None  # reserved by the allocator, holding no tensor
    others_bytes: int | None = None  # of other processes on the same card

    @property
    def fragmented(self) -> bool:
        """The allocator held more than what it could not give: in pieces."""
        return bool(self.wanted_bytes and self.idle_bytes and self.idle_bytes >= self.wanted_bytes)

    def notes(self) -> tuple[str, ...]:
        """Sentences for a person."""
        said = []
        if self.fragmented:
            assert self.idle_bytes is not None
            said.append(f"fragmentation: {format_bytes(self.idle_bytes)} reserved but unallocated: set {EXPANDABLE}")
        if self.others_bytes and self.others_bytes > 2**30:
            said.append(
                f"other processes hold {format_bytes(self.others_bytes)} of this card: end them first (nvidia-smi)"
            )
        return tuple(said)


def shortage_in(text: str) -> Shortage:
    """The numbers of one message."""
    idle = _bytes(_IDLE, text)
    allocated, reserved = _bytes(_ALLOCATED, text), _bytes(_RESERVED, text)
    if idle is None and allocated is not None and reserved is not None:
        idle = max(0, reserved - allocated)
    # Without "this process has" a lone "Process 4121 has" may be this one, seen from inside a container.
    told_apart = "this process has" in text.lower()
    others = [size for found in _OTHERS.finditer(text) if told_apart and (size := _size(found[1])) is not None]
    return Shortage(
        wanted_bytes=_bytes(_WANTED, text), free_bytes=_bytes(_FREE, text), idle_bytes=idle,
        others_bytes=sum(others) if others else None,
    )  # fmt: skip


def _bytes(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return _size(next(group for group in found.groups() if group)) if found else None


def _size(text: str) -> int | None:
    try:
        return parse_bytes(text)
    except ValueError:
        return None
