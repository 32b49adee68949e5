"""Describe a workload: its parameters, its layers of experts, whether it can recompute activations."""

from __future__ import annotations

from typing import Any

from ..workload.protocol import Workload, WorkloadError
from .batch import check_batch, count_elements, tokens_per_sample
from .pipeline import build_whole, pipeline_facts


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
