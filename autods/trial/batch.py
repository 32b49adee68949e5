"""The user's batch: checked against the contract, moved to the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..workload import WorkloadError


def tensors_of(batch: Any) -> dict[str, Any]:
    """The batch's tensors by name or position, however deep; '0.1' is the second of a tuple that stands first."""
    import torch

    found = {}
    for name, item in batch.items() if isinstance(batch, Mapping) else enumerate(batch):
        if isinstance(item, torch.Tensor):
            found[str(name)] = item
        elif isinstance(item, Mapping | tuple | list):
            found.update({f"{name}.{inner}": one for inner, one in tensors_of(item).items()})
    return found


def check_batch(batch: Any, micro_batch: int, *, by: str = "build_batch") -> Any:
    """The batch itself, which the function `by` made. Raises WorkloadError when it is no dict or tuple of tensors of
    micro_batch samples."""
    if not isinstance(batch, Mapping | tuple | list):
        raise WorkloadError(f"{by} returned {type(batch).__name__}", mend="return a dict or a tuple of tensors")
    tensors = tensors_of(batch)
    if not tensors:
        raise WorkloadError(f"{by} returned no tensor", mend="return a dict or a tuple of tensors")
    for name, tensor in tensors.items():
        if tensor.dim() and tensor.shape[0] != micro_batch:
            raise WorkloadError(
                f"{by}({micro_batch}) returned {name!r} of shape {tuple(tensor.shape)}",
                mend=f"its first dimension must be the micro batch size, {micro_batch}",
            )
    return batch


def tokens_per_sample(batch: Any) -> int | None:
    """The sequence length of a batch of token ids (the first whole-number tensor of shape [micro batch, sequence])."""
    for tensor in tensors_of(batch).values():
        if tensor.dim() == 2 and not tensor.is_floating_point() and tensor.shape[1] > 1:
            return int(tensor.shape[1])
    return None


def place(batch: Any, engine: Any) -> Any:
    """Tensors on the engine's device; floating-point ones in its dtype, as a training loop casts its inputs."""
    import torch

    dtype = next((p.dtype for p in engine.module.parameters() if p.is_floating_point()), None)

    def move(item: Any) -> Any:
        if isinstance(item, Mapping | tuple | list) and tensors_of(item):
            inner = {key: move(one) for key, one in item.items()} if isinstance(item, Mapping) else map(move, item)
            return inner if isinstance(inner, dict) else tuple(inner)
        if not isinstance(item, torch.Tensor):
            return item
        return item.to(engine.device, dtype if item.is_floating_point() else None)

    if isinstance(batch, Mapping):
        return {key: move(item) for key, item in batch.items()}
    return tuple(move(item) for item in batch)
