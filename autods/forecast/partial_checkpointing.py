"""Which share of a model's alike layers to recompute: no simulation of a share is needed to choose it.

Layers that are alike need alike memory and time. Both lie between those of all layers recomputed and of none.
A rung's time with a share lies on the line between the two. Its peak lies on that line or below: at each moment of a
step the bytes are on a line, and a peak is the largest of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..config.checkpointing import PARTIAL
from .largest_batch import Fills, find_largest


@dataclass(frozen=True, slots=True)
class ShareEnd:
    """What is known of a config at one end, where all layers are recomputed or none.

    Both functions take a micro batch, and return None where they do not know. `find_rate` returns samples a second.
    """

    find_fills: Callable[[int], Fills | None]
    find_rate: Callable[[int], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShare:
    """One in `every` layers is recomputed, at the largest micro batch that fits so."""

    every: int
    micro_batch: int
    samples_per_second: float


def rank_shares(all_layers: ShareEnd, none: ShareEnd, layers: int, sizes: Sequence[int]) -> list[LayerShare]:
    """Return the shares of so many `layers`, fastest first, where one of `sizes` fits and the times are known."""
    known: dict[int, tuple[Fills | None, Fills | None]] = {}

    def find_fills(size: int) -> tuple[Fills | None, Fills | None]:
        if size not in known:
            known[size] = all_layers.find_fills(size), none.find_fills(size)
        return known[size]

    def forecast(every: int) -> LayerShare | None:
        part = math.ceil(layers / every) / layers

        def fill(size: int) -> Fills:
            most, least = find_fills(size)
            if most is None or least is None:
                return {"unknown": math.inf}
            return {name: part * most.get(name, 0.0) + (1 - part) * least.get(name, 0.0) for name in {**most, **least}}

        size = find_largest(fill, sizes).micro_batch
        rates = None if size is None else (all_layers.find_rate(size), none.find_rate(size))
        if size is None or rates is None or not rates[0] or not rates[1]:
            return None
        rate = 1 / (part / rates[0] + (1 - part) / rates[1])
        return LayerShare(every=every, micro_batch=size, samples_per_second=rate)

    shares = [share for every in PARTIAL.values() if every <= layers and (share := forecast(every)) is not None]
    return sorted(shares, key=lambda share: share.samples_per_second, reverse=True)
