"""Facts of a model, and the batches of its workload: drawn, checked, placed, and the longest of them."""

from __future__ import annotations

import contextlib
import math
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..types import ModelFacts
from ..workload.protocol import Workload, WorkloadError
from .checkpointing import list_alike_layers, list_recomputing
from .pipeline import build_whole, pipeline_facts

DRAWS = 16  # of build_batch if the workload has no build_longest_batch: it may pad to random lengths

_TOKEN_IDS = re.compile(r"(^|[._])(input)?ids|tokens")
_NO_TEXT = re.compile("label|target|type|position|segment|mask")


def find_card() -> tuple[str, Any] | None:
    """Return the kind of card that this process uses, such as 'cuda', and torch's module for it; None on the CPU."""
    import torch

    card = torch.accelerator.current_accelerator(check_available=True)
    return None if card is None else (card.type, torch.get_device_module(card))


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

    Some models take the patches of all images in one dimension (Qwen3-VL's pixel_values): such a tensor has several
    rows a sample, beside others that have one. Raises WorkloadError if it is no dict or tuple of tensors with
    `micro_batch` samples.
    """
    is_container = isinstance(batch, Mapping | tuple | list)
    tensors = named_tensors(batch) if is_container else {}
    if not tensors:
        problem = "no tensor" if is_container else type(batch).__name__
        raise WorkloadError(f"{by} returned {problem}", hint="return a dict or a tuple of tensors")
    rows = {name: tensor.shape[0] for name, tensor in tensors.items() if tensor.dim()}
    for name, count in rows.items():
        if micro_batch not in rows.values() or count % micro_batch:
            raise WorkloadError(
                f"{by}({micro_batch}) returned {name!r} of shape {tuple(tensors[name].shape)}",
                hint=f"its first dimension must be the micro batch size, {micro_batch}",
            )
    return batch


def text_shapes(batch: Any, *, shifts_labels: bool = False) -> list[tuple[int, int]]:
    """Return the shapes [rows, tokens] of the texts in a batch: both of a pair, the encoder's and the decoder's.

    Texts are integer tensors that are named like token ids. Without such a name the first one is the text, because the
    next may be its labels. With `shifts_labels` the model's decoder reads the labels, unless it is given other tokens.
    """
    import torch

    integers = {
        name: (int(tensor.shape[0]), int(tensor.shape[1]))
        for name, tensor in named_tensors(batch).items()
        if tensor.dim() == 2 and tensor.shape[1] > 1
        if not tensor.is_floating_point() and tensor.dtype != torch.bool
    }
    texts = [name for name in integers if _TOKEN_IDS.search(name) and not _NO_TEXT.search(name)]
    if shifts_labels and texts and not any("decoder" in name for name in texts):
        texts += [name for name in integers if name.endswith("labels")]
    return [integers[name] for name in texts or list(integers)[:1]]


def place(batch: Any, engine: Any) -> Any:
    """Return the batch on the engine's device, floating-point tensors in the engine's dtype."""
    import torch
    from torch.utils._pytree import tree_map_only

    dtype = next((p.dtype for p in engine.module.parameters() if p.is_floating_point()), None)

    def move(tensor: Any) -> Any:
        return tensor.to(engine.device, dtype if tensor.is_floating_point() else None)

    return tree_map_only(torch.Tensor, move, dict(batch) if isinstance(batch, Mapping) else batch)


def longest_batch(workload: Workload, micro_batch: int) -> tuple[Any, int]:
    """Return a longest batch, and the number of draws of `build_batch` among which it has most elements.

    The number is 0 if the workload's own `build_longest_batch` made it. Each rank draws its batches itself. Raises
    WorkloadError if a batch breaks the contract.
    """
    if workload.build_longest_batch is not None:
        return check_batch(workload.build_longest_batch(micro_batch), micro_batch, by="build_longest_batch"), 0
    longest = check_batch(workload.build_batch(micro_batch), micro_batch)
    for _ in range(DRAWS - 1):
        batch = check_batch(workload.build_batch(micro_batch), micro_batch)
        if count_elements(batch) > count_elements(longest):
            longest = batch
        del batch  # so that at most two batches are in memory
    return longest, DRAWS


def count_elements(batch: Any) -> int:
    """Count the elements of all tensors of a batch."""
    return sum(tensor.numel() for tensor in named_tensors(batch).values())


def largest_shape(batch: Any) -> tuple[int, ...]:
    """Return the shape of the largest tensor."""
    return tuple(max(named_tensors(batch).values(), key=lambda tensor: tensor.numel()).shape)


def shifts_labels(model: Any) -> bool:
    """Whether the model has an encoder and a decoder, as its Hugging Face config says; its decoder reads the labels."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def is_moe(module: Any) -> bool:
    """Whether this module is a layer of `deepspeed.moe`; DeepSpeed need not be imported for it."""
    return type(module).__name__ == "MoE" and isinstance(getattr(module, "num_experts", None), int)


def survey(workload: Workload) -> ModelFacts:
    """Return the facts of the workload. Exceptions of the user's code are passed on.

    The model is built on the meta device, which takes no memory, or for real if its code cannot do that.
    """
    import torch

    batch = check_batch(workload.build_batch(1), 1)
    try:
        with torch.device("meta"):
            model = build_whole(workload.build)
    except Exception:  # a mistake of the user's comes up again in the real build
        model = build_whole(workload.build)
    facts = describe_model(workload, model, batch)
    ratio = 1.0
    if workload.build_longest_batch is not None:
        with contextlib.suppress(Exception):  # the exam will report it
            longest = check_batch(workload.build_longest_batch(1), 1, by="build_longest_batch")
            ratio = max(ratio, count_elements(longest) / max(1, count_elements(batch)))
    return replace(facts, longest_ratio=ratio)


def describe_model(workload: Workload, model: Any, batch: Any) -> ModelFacts:
    """Return the facts of a model and a batch of one sample. Raises WorkloadError if nothing trains."""
    texts = text_shapes(batch, shifts_labels=shifts_labels(model))
    return ModelFacts(
        **count_parameters(model),
        checkpointing=bool(list_recomputing(model)),
        alike_layers=sum(map(len, list_alike_layers(model))),
        tokens_per_sample=sum(rows * tokens for rows, tokens in texts) or None,
        seq_len=texts[0][1] if texts else None,
        has_optimizer=workload.build_optimizer is not None,
    )


def estimate_checkpoint_bytes(model: Any) -> int:
    """Estimate the bytes of a checkpoint: the weights, and for each that is trained Adam's fp32 copy and two moments.

    These are the files of all ranks together.
    """
    return sum(
        int(getattr(weights, "ds_numel", weights.numel()) * (weights.element_size() + 12 * weights.requires_grad))
        for weights in model.parameters()
    )


def _count_weights(parameter: Any) -> int:
    """Return the weights that a parameter stands for, wherever they are: also those that bitsandbytes has packed."""
    packed = getattr(parameter, "quant_state", None)
    return int(getattr(parameter, "ds_numel", parameter.numel()) if packed is None else math.prod(packed.shape))


def _count_frozen_in_layer(model: Any) -> int:
    """Return how many frozen matrices the layer has that has the most; a layer is one of a list of modules."""
    from torch import nn

    def count(layer: Any) -> int:
        frozen = (weights for weights in layer.parameters() if not weights.requires_grad)
        return sum(len(getattr(weights, "ds_shape", weights.shape)) > 1 for weights in frozen)

    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    return max((count(layer) for layers in lists for layer in layers), default=0)


def count_parameters(model: Any, *, by: str = "build_model returned") -> dict[str, Any]:
    """Return the counts of parameters, of the largest tensor's elements, of a layer's frozen ones, stages and experts.

    `by` names the model's origin in errors. Raises WorkloadError if there is nothing to train.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise WorkloadError(f"{by} {type(model).__name__}", hint="it has to be a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise WorkloadError(f"{by} a model without a parameter to train", hint="check requires_grad")
    sizes = [_count_weights(parameter) for parameter in model.parameters()]
    trained = sum(size for size, weights in zip(sizes, model.parameters(), strict=True) if weights.requires_grad)
    experts: list[Any] = [module.num_experts for module in model.modules() if is_moe(module)]
    return {
        "parameters": sum(sizes),
        "trained_parameters": None if trained == sum(sizes) else trained,
        "largest_parameter": max(sizes),
        "frozen_in_layer": _count_frozen_in_layer(model),
        **pipeline_facts(model),
        "experts": max(experts, default=0),
    }
