"""Facts of a model, and the batches of its workload: drawn, checked, placed, and the longest of them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..workload.protocol import Workload, WorkloadError
from .pipeline import build_whole, pipeline_facts


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

    Each rank draws its batches itself. Raises WorkloadError if a batch breaks the contract.
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


def is_moe(module: Any) -> bool:
    """Whether this module is a layer of `deepspeed.moe`; DeepSpeed need not be imported for it."""
    return type(module).__name__ == "MoE" and isinstance(getattr(module, "num_experts", None), int)


def count_experts(model: Any) -> int:
    """Return the experts of the largest layer; 0 if there is none."""
    return max((module.num_experts for module in model.modules() if is_moe(module)), default=0)


# The name in transformers 5.2x and later, and the name before.
_CHECKPOINTING_METHODS = ("activation_checkpointing_enable", "gradient_checkpointing_enable")


def can_checkpoint(model: Any) -> bool:
    """Whether the model has a method that turns on gradient checkpointing, and declares that it works."""
    return any(hasattr(model, name) for name in _CHECKPOINTING_METHODS) and bool(
        getattr(model, "supports_gradient_checkpointing", True)
    )


def enable_checkpointing(model: Any) -> None:
    """Make the model recompute its activations in backward."""
    next(getattr(model, name) for name in _CHECKPOINTING_METHODS if hasattr(model, name))()


def survey(workload: Workload) -> dict[str, Any]:
    """Return `ModelFacts` of the workload as a dict. Exceptions of the user's code are passed on.

    The model is built on the meta device, which takes no memory, or for real if its code cannot do that.
    """
    batch = check_batch(workload.build_batch(1), 1)
    return describe_model(workload, _build(workload), batch) | {"longest_ratio": _longest_ratio(workload, batch)}


def describe_model(workload: Workload, model: Any, batch: Any) -> dict[str, Any]:
    """Return `ModelFacts` of a model and a batch as a dict. Raises WorkloadError if nothing can be trained."""
    return {
        **count_parameters(model),
        "checkpointing": can_checkpoint(model),
        "tokens_per_sample": tokens_per_sample(batch),
        "has_optimizer": workload.build_optimizer is not None,
    }


def count_parameters(model: Any, *, by: str = "build_model returned") -> dict[str, int]:
    """Return the counts of parameters, of the largest tensor's elements, of pipeline stages and of experts.

    `by` names the model's origin in errors. Raises WorkloadError if there is nothing to train.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise WorkloadError(f"{by} {type(model).__name__}", hint="it has to be a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise WorkloadError(f"{by} a model without a parameter to train", hint="check requires_grad")
    sizes = [getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters()]
    parts = {**pipeline_facts(model), "experts": count_experts(model)}
    return {"parameters": sum(sizes), "largest_parameter": max(sizes), **parts}


def _longest_ratio(workload: Workload, batch: Any) -> float:
    """Return the elements of a longest sample divided by those of this one; 1 without `build_longest_batch`."""
    if workload.build_longest_batch is None:
        return 1.0
    try:
        longest = check_batch(workload.build_longest_batch(1), 1, by="build_longest_batch")
    except Exception:  # the exam will report it
        return 1.0
    return max(1.0, count_elements(longest) / max(1, count_elements(batch)))


def _build(workload: Workload) -> Any:
    import torch

    try:
        with torch.device("meta"):
            return build_whole(workload.build_model)
    except Exception:  # a mistake of the user's comes up again in the real build
        return build_whole(workload.build_model)
