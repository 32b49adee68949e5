"""The cards before and after a job: a trial that leaves memory behind would make the next one seem larger.

Kept by the process that forks the ranks. It asks NVML, opened for the moment alone, so that it stays fit to be forked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..cards import used_bytes
from ..units import show_bytes
from ..values import Device

Look = Callable[[], "tuple[int, ...] | None"]

_NOISE_BYTES = 64 * 2**20  # less than any process with a context on the card
_WAIT_S = 3.0  # a driver frees a dead process's memory a little after the process is gone
_EVERY_S = 0.05


def _used() -> tuple[int, ...] | None:
    return used_bytes(os.environ.get("CUDA_VISIBLE_DEVICES"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CardWatch:
    """`begin` before the ranks start, `said` when they are gone. ranks: of this node, one a card, from the first on."""

    before: tuple[int, ...] | None
    ranks: int
    look: Look = _used

    @classmethod
    def begin(cls, device: Device, ranks: int, look: Look = _used) -> CardWatch:
        """What is held of each card now; CPU ranks have none to look at."""
        return cls(before=look() if device == "cuda" else None, ranks=ranks, look=look)

    def said(self, wait: Callable[[float], None] = time.sleep) -> list[str]:
        """A sentence for each card that did not come back to what it held, after some time for it."""
        if self.before is None:
            return []
        left, waited = tuple(self._left()), 0.0
        while left and waited < _WAIT_S:
            wait(_EVERY_S)
            waited += _EVERY_S
            left = tuple(self._left())
        return [
            f"card {index} did not come back after this trial: {show_bytes(more)} more than before are held; what is "
            "measured next may be too large (nvidia-smi shows by whom)"
            for index, more in left
        ]

    def _left(self) -> Iterator[tuple[int, int]]:
        """Place of a card, and what it holds more than before."""
        now = self.look() or ()
        for index, (held, before) in enumerate(zip(now[: self.ranks], self.before or (), strict=False)):
            if held - before >= _NOISE_BYTES:
                yield index, held - before
