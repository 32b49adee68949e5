"""The sizes in an allocator's error message: what was wanted, and what the card had left."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from ..units import format_bytes, parse_bytes

_SIZE = r"([\d.]{1,30} ?[KMGT]?i?B)(?:ytes)?\b"  # without a limit, a line of digits takes seconds
_WANTED = re.compile(rf"tried to allocate {_SIZE}", re.IGNORECASE)
_FREE = re.compile(rf"of which {_SIZE} is free|; {_SIZE} free", re.IGNORECASE)
_TOTAL = re.compile(rf"total capacity of {_SIZE}|{_SIZE} total capacity", re.IGNORECASE)
_ALLOWED = re.compile(rf"{_SIZE} allowed|max allowed|memory limit", re.IGNORECASE)
_IDLE = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated", re.IGNORECASE)
_ALLOCATED = re.compile(rf"{_SIZE} already allocated", re.IGNORECASE)
_RESERVED = re.compile(rf"{_SIZE} reserved in total", re.IGNORECASE)
_OTHERS = re.compile(rf"(?<!this )process (\d+) has {_SIZE} memory in use", re.IGNORECASE)
_SOME_BYTES = 2**26
_FEW_BYTES = 2**20  # torch's allocator takes 2 MiB at least from the driver
_VARIABLE = re.compile(r"PYTORCH_(?:\w+_)?ALLOC_CONF")  # its name depends on the release, and the message has it
_USUAL_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
_OF_NPU = re.compile(r"\bNPU out of memory", re.IGNORECASE)  # Ascend's messages name no variable


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Sizes in an out-of-memory message; None where the message does not have them."""

    wanted_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    limited: bool = False  # the process may use a part of the card only
    idle_bytes: int | None = None  # reserved by the allocator, holding no tensor
    others_bytes: int | None = None  # of other processes on the same card
    variable: str = _USUAL_VARIABLE  # of the environment, that sets torch's allocator

    @property
    def fragmented(self) -> bool:
        """Whether the allocator held enough free memory, but in pieces."""
        return bool(self.wanted_bytes and self.idle_bytes and self.idle_bytes >= self.wanted_bytes)

    @property
    def contradicts_itself(self) -> bool:
        """Whether the card was not full: most of it was free, or far more than what was refused."""
        if self.limited or self.wanted_bytes is None:
            return False
        free, total = self.free_bytes, self.total_bytes
        if self.wanted_bytes < _FEW_BYTES:
            return free is None or free > 2 * _FEW_BYTES
        if free is None:
            return False
        return free > 32 * max(self.wanted_bytes, _SOME_BYTES) or (
            total is not None and free > total / 2 and free > 2 * self.wanted_bytes
        )

    def notes(self) -> tuple[str, ...]:
        """Sentences on fragmentation and on other processes."""
        sentences = []
        if self.fragmented:
            idle = format_bytes(self.idle_bytes or 0)
            sentences.append(
                f"fragmentation: {idle} reserved but unallocated: set {self.variable}=expandable_segments:True"
            )
        if self.others_bytes and self.others_bytes > 2**30:
            others = format_bytes(self.others_bytes)
            sentences.append(
                f"other processes hold {others} of this card: end them (nvidia-smi), or let them take less"
            )
        return tuple(sentences)


def parse_shortage(text: str) -> Shortage:
    """Return the sizes in one message."""
    idle, allocated, reserved = (next(_sizes(size, text), None) for size in (_IDLE, _ALLOCATED, _RESERVED))
    if idle is None and allocated is not None and reserved is not None:
        idle = max(0, reserved - allocated)
    # Without "this process has", a lone "Process 4121 has" may be this process, seen from inside a container.
    named = dict(_OTHERS.findall(text)) if "this process has" in text.lower() else {}  # by pid: a text may repeat it
    others = sum(_sizes(re.compile(_SIZE, re.IGNORECASE), " ".join(named.values())))
    wanted, free, total = (next(_sizes(size, text), None) for size in (_WANTED, _FREE, _TOTAL))
    return Shortage(
        wanted_bytes=wanted,
        free_bytes=free,
        total_bytes=total,
        limited=_ALLOWED.search(text) is not None,
        idle_bytes=idle,
        others_bytes=others or None,
        variable=_find_variable(text),
    )


def _find_variable(text: str) -> str:
    """The variable that sets the allocator of the device in the message."""
    if named := _VARIABLE.search(text):
        return named[0]
    return "PYTORCH_NPU_ALLOC_CONF" if _OF_NPU.search(text) else _USUAL_VARIABLE


def _sizes(pattern: re.Pattern[str], text: str) -> Iterator[int]:
    for match in pattern.finditer(text):
        with suppress(ValueError):
            size = next(filter(None, match.groups()))
            yield parse_bytes(size) if size.strip("0. ")[:1].isdigit() else 0
