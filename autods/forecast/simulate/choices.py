"""How many tokens experts get: routers choose by values, which simulated tensors lack, but the sum is known.

A router makes a one-hot mask of the experts that each token has chosen, and asks for the tokens of one expert after
another (`torch.where(mask[expert])`). Together the experts get as many tokens as there are choices. The first ones are
taken to get all tokens until none are left, which is the largest that any routing needs at a time.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _Mask:
    """A one-hot mask that lives. `left` choices have not been given out; a slice has at most `tokens` of them."""

    storage: weakref.ref[Any]
    tokens: int
    left: int


class Choices:
    """The one-hot masks of a simulation, by their storage."""

    def __init__(self) -> None:
        self._masks: dict[int, _Mask] = {}

    def note(self, mask: Any, chosen: Any) -> None:
        """Note the one-hot mask of `chosen`, whose last dimension has the choices of one token; of one it is a list."""
        storage = mask.untyped_storage()
        tokens = chosen.numel() if chosen.dim() < 2 else chosen.numel() // max(1, chosen.shape[-1])
        self._masks[storage._cdata] = _Mask(storage=weakref.ref(storage), tokens=tokens, left=chosen.numel())

    def take(self, slice_of_mask: Any) -> int | None:
        """Return how many ones a slice of a mask has, and take them off; None for other tensors."""
        storage = slice_of_mask.untyped_storage()
        mask = self._masks.get(storage._cdata)
        if mask is None:
            return None
        if mask.storage() is not storage:  # another storage has the address by now
            del self._masks[storage._cdata]
            return None
        count = min(mask.left, mask.tokens, slice_of_mask.numel())
        mask.left -= count
        return int(count)
