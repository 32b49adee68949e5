"""The longest batch that training can meet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..workload import Workload
from .batch import check_batch, tensors_of
from .rendezvous import Ranks

DRAWS = 16  # of build_batch, where the workload has no build_longest_batch: it may pad to random lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Longest:
    """The batch, the shape of its largest tensor, and of how many draws it is the longest (0: it was asked for)."""

    batch: Any
    shape: tuple[int, ...]
    draws: int


def longest_batch(workload: Workload, micro_batch: int) -> Longest:
    """Of `build_longest_batch`; without one, the largest by elements of some draws of `build_batch`.

    Each rank takes its own. Raises WorkloadError where a batch breaks the contract.
    """
    if workload.build_longest_batch is not None:
        longest = check_batch(workload.build_longest_batch(micro_batch), micro_batch, by="build_longest_batch")
        return Longest(batch=longest, shape=_shape(longest), draws=0)
    longest = check_batch(workload.build_batch(micro_batch), micro_batch)
    for _ in range(DRAWS - 1):
        batch = check_batch(workload.build_batch(micro_batch), micro_batch)
        if elements_of(batch) > elements_of(longest):
            longest = batch
        del batch  # no third one beside the next draw
    return Longest(batch=longest, shape=_shape(longest), draws=DRAWS)


def same_as_longest(workload: Workload, micro_batch: int, batch: Any, ranks: Ranks) -> Longest | None:
    """The longest batch, if this one is as long on every rank; None: it is not. All ranks have to call."""
    longest = longest_batch(workload, micro_batch)
    same = ranks.mean(float(_shapes_of(longest.batch) == _shapes_of(batch))) == 1.0
    return replace(longest, batch=()) if same else None


def _shapes_of(batch: Any) -> dict[str, tuple[int, ...]]:
    """Of its tensors, by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors_of(batch).items()}


def elements_of(batch: Any) -> int:
    """Of all its tensors."""
    return sum(tensor.numel() for tensor in tensors_of(batch).values())


def _shape(batch: Any) -> tuple[int, ...]:
    return tuple(max(tensors_of(batch).values(), key=lambda tensor: tensor.numel()).shape)
