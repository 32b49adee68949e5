"""Facts of a model and its batches."""

from __future__ import annotations

from typing import Any

from ..workload.protocol import Workload, WorkloadError
from .batch import check_batch, count_elements, tokens_per_sample
from .pipeline import build_whole, pipeline_facts


def is_moe(module: Any) -> bool:
    """Whether this module is one; DeepSpeed need not be imported for it."""
    return type(module).__name__ == "MoE" and isinstance(getattr(module, "num_experts", None), int)


def count_experts(model: Any) -> int:
    """Of its largest layer; 0: it has none."""
    return max((module.num_experts for module in model.modules() if is_moe(module)), default=0)


# The name of transformers 5.2x and later, and the one before it.
_METHODS = ("activation_checkpointing_enable", "gradient_checkpointing_enable")


def can_checkpoint(model: Any) -> bool:
    """Whether the model has the method, and says that it works."""
    return any(hasattr(model, name) for name in _METHODS) and bool(
        getattr(model, "supports_gradient_checkpointing", True)
    )


def enable_checkpointing(model: Any) -> None:
    """Let the model recompute its activations in backward."""
    next(getattr(model, name) for name in _METHODS if hasattr(model, name))()


def survey(workload: Workload) -> dict[str, Any]:
    """`ModelFacts` as a dict. What the user's code raises is passed on.

    The model is built on the meta device, so that its size costs nothing; code that cannot do that is built for real.
    """
    batch = check_batch(workload.build_batch(1), 1)
    return describe_model(workload, _build(workload), batch) | {"longest_ratio": _longest_ratio(workload, batch)}


def describe_model(workload: Workload, model: Any, batch: Any) -> dict[str, Any]:
    """`ModelFacts` as a dict, of what is built already. WorkloadError when it cannot be trained."""
    return {
        **count_parameters(model),
        "checkpointing": can_checkpoint(model),
        "tokens_per_sample": tokens_per_sample(batch),
        "has_optimizer": workload.build_optimizer is not None,
    }


def count_parameters(model: Any, *, by: str = "build_model returned") -> dict[str, int]:
    """How many parameters there are, in the largest tensor too, and the stages and experts that they are in.

    Raises WorkloadError when there is nothing to train.
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
    """Elements of the longest batch by those of this one, a sample each; 1 where the workload does not make its own."""
    if workload.build_longest_batch is None:
        return 1.0
    try:
        longest = check_batch(workload.build_longest_batch(1), 1, by="build_longest_batch")
    except Exception:  # whatever it is: the exam that runs on it says so, and what it is not able to prove
        return 1.0
    return max(1.0, count_elements(longest) / max(1, count_elements(batch)))


def _build(workload: Workload) -> Any:
    import torch

    try:
        with torch.device("meta"):
            return build_whole(workload.build_model)
    except Exception:  # whatever it is: if it is the user's mistake, the real build says so in the user's terms
        return build_whole(workload.build_model)
