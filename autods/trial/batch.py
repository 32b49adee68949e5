"""Check the batches of a workload, place them on the device, and find the longest."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..workload.protocol import Workload, WorkloadError


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch, on every device."""
    import numpy
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    numpy.random.seed(seed % 2**32)


def named_tensors(batch: Any) -> dict[str, Any]:
    """Return all tensors of a batch, nested ones too, by name: '0.1' is the second item of the first tuple."""
    import torch

    tensors = {}
    for name, item in batch.items() if isinstance(batch, Mapping) else enumerate(batch):
        if isinstance(item, torch.Tensor):
            tensors[str(name)] = item
        elif isinstance(item, Mapping | tuple | list):
            tensors.update({f"{name}.{inner}": tensor for inner, tensor in named_tensors(item).items()})
    return tensors


def check_batch(batch: Any, micro_batch: int, *, by: str = "build_batch") -> Any:
    """Return the batch, which the user's function `by` made.

    Raises WorkloadError if it is no dict or tuple of tensors with `micro_batch` samples.
    """
    if not isinstance(batch, Mapping | tuple | list):
        raise WorkloadError(f"{by} returned {type(batch).__name__}", hint="return a dict or a tuple of tensors")
    tensors = named_tensors(batch)
    if not tensors:
        raise WorkloadError(f"{by} returned no tensor", hint="return a dict or a tuple of tensors")
    for name, tensor in tensors.items():
        if tensor.dim() and tensor.shape[0] != micro_batch:
            raise WorkloadError(
                f"{by}({micro_batch}) returned {name!r} of shape {tuple(tensor.shape)}",
                hint=f"its first dimension must be the micro batch size, {micro_batch}",
            )
    return batch


def tokens_per_sample(batch: Any) -> int | None:
    """Return the sequence length of the first integer tensor of shape [micro batch, sequence]; None without one."""
    for tensor in named_tensors(batch).values():
        if tensor.dim() == 2 and not tensor.is_floating_point() and tensor.shape[1] > 1:
            return int(tensor.shape[1])
    return None


def place(batch: Any, engine: Any) -> Any:
    """Return the batch on the engine's device, floating-point tensors in the engine's dtype."""
    import torch

    dtype = next((p.dtype for p in engine.module.parameters() if p.is_floating_point()), None)

    def move(item: Any) -> Any:
        if isinstance(item, Mapping | tuple | list) and named_tensors(item):
            inner = {key: move(value) for key, value in item.items()} if isinstance(item, Mapping) else map(move, item)
            return inner if isinstance(inner, dict) else tuple(inner)
        if not isinstance(item, torch.Tensor):
            return item
        return item.to(engine.device, dtype if item.is_floating_point() else None)

    if isinstance(batch, Mapping):
        return {key: move(item) for key, item in batch.items()}
    return tuple(move(item) for item in batch)


DRAWS = 16  # of build_batch if the workload has no build_longest_batch: it may pad to random lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestBatch:
    """A batch, the shape of its largest tensor, and the number of draws among which it is the longest.

    `draws` is 0 for a batch of the workload's own `build_longest_batch`.
    """

    batch: Any
    shape: tuple[int, ...]
    draws: int


def longest_batch(workload: Workload, micro_batch: int) -> LongestBatch:
    """Call `build_longest_batch`; without it, return the batch with most elements of some draws of `build_batch`.

    Each rank draws its own. Raises WorkloadError if a batch breaks the contract.
    """
    if workload.build_longest_batch is not None:
        longest = check_batch(workload.build_longest_batch(micro_batch), micro_batch, by="build_longest_batch")
        return LongestBatch(batch=longest, shape=_shape(longest), draws=0)
    longest = check_batch(workload.build_batch(micro_batch), micro_batch)
    for _ in range(DRAWS - 1):
        batch = check_batch(workload.build_batch(micro_batch), micro_batch)
        if count_elements(batch) > count_elements(longest):
            longest = batch
        del batch  # so that at most two batches are in memory
    return LongestBatch(batch=longest, shape=_shape(longest), draws=DRAWS)


def count_elements(batch: Any) -> int:
    """Count the elements of all tensors of a batch."""
    return sum(tensor.numel() for tensor in named_tensors(batch).values())


def _shape(batch: Any) -> tuple[int, ...]:
    return tuple(max(named_tensors(batch).values(), key=lambda tensor: tensor.numel()).shape)
