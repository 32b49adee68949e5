"""The kind of each block on the device: parameters, gradients, optimizer, activations, buckets or other.

A block gets its kind from the code that allocates it, a small one from the phase alone. Tensors that the engine still
holds after the steps get the kind of their place in it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...rank import model_trial
from ..values import KINDS, ForecastPhase
from .ledger import Ledger

_PARAMETERS, _GRADIENTS, _OPTIMIZER, _ACTIVATIONS, _BUCKETS, _OTHER = range(len(KINDS))
_BUILD = model_trial.build.__code__
_LARGE = 1 << 20  # bytes; for smaller blocks the search for the caller takes too long
_WRAPPER = "/deepspeed/utils/nvtx.py"  # between DeepSpeed and the functions of torch that it marks for a profiler
_BY_PHASE = {
    "build": _PARAMETERS, "init": _OPTIMIZER, "forward": _ACTIVATIONS, "backward": _ACTIVATIONS, "step": _OPTIMIZER,
}  # fmt: skip
# By file of DeepSpeed and part of the function's name; the first row that matches the nearest frame decides.
_ZERO = ("stage3.py", "stage_1_and_2.py")
_HOLDERS = (
    "partition_parameters.py", "partitioned_param_coordinator.py", "partitioned_param_swapper.py",
    "parameter_offload.py",
)  # fmt: skip
_BY_CALLER: tuple[tuple[tuple[str, ...], tuple[str, ...], int], ...] = (
    (_HOLDERS, ("",), _PARAMETERS),
    (_ZERO, ("bucket", "ipg", "reduce", "avg_scatter", "average"), _BUCKETS),
    (_ZERO, ("grad",), _GRADIENTS),
    (("coalesced_collectives.py",), ("",), _BUCKETS),
    (("engine.py",), ("reduce",), _BUCKETS),
    (("engine.py",), ("_configure_distributed_model",), _PARAMETERS),
)
# Attributes of DeepSpeed's optimizers that hold tensors from step to step.
_PERSISTENT = {
    _OPTIMIZER: (
        "single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat",
        "fp32_groups_flat_partition", "fp32_groups", "master_params",
    ),
    _GRADIENTS: ("averaged_gradients", "grad_partitions_flat_buffer", "all_grad_tensors", "fp32_groups_gradients"),
    _BUCKETS: ("ipg_buffer", "ipg_buckets"),
    _PARAMETERS: ("bit16_groups_flat", "fp16_groups_flat", "fp16_partitioned_groups_flat", "lp_param_buffer"),
}  # fmt: skip


def kind_by_caller(phase: ForecastPhase, size: int) -> int:
    """The kind of a new block, by the code on the stack. The ledger calls it for every allocation on the device."""
    by_phase = _BY_PHASE[phase]
    frame: Any = sys._getframe(3) if size >= _LARGE else None
    while frame is not None:
        code = frame.f_code
        if _decides(code.co_filename):
            kind = _PARAMETERS if code is _BUILD else _kind_of_function(code.co_filename, code.co_name)
            return by_phase if kind is None else kind
        frame = frame.f_back
    return by_phase


@functools.cache
def _decides(path: str) -> bool:
    """Whether the first frame of this file decides: one of DeepSpeed's, or the one that builds the model."""
    return path == _BUILD.co_filename or ("/deepspeed/" in path and not path.endswith(_WRAPPER))


@functools.cache
def _kind_of_function(path: str, name: str) -> int | None:
    """The kind of what a function of DeepSpeed allocates; None where the phase decides."""
    file = path.rpartition("/")[2]
    rows = (kind for files, parts, kind in _BY_CALLER if file in files and any(part in name for part in parts))
    return next(rows, None)


def label_gradients(ledger: Ledger, model: Any) -> None:
    """Label the parameters' gradients as soon as autograd has made them."""

    def label_gradient(parameter: Any) -> None:
        if parameter.grad is not None:
            ledger.label(parameter.grad, _GRADIENTS)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(label_gradient)


def label_persistent(ledger: Ledger, engine: Any) -> None:
    """Label tensors that live from step to step by the attribute of the engine that holds them."""
    optimizer = engine.optimizer
    for kind, names in _PERSISTENT.items():
        for name in names:
            for tensor in _tensors(getattr(optimizer, name, None)):
                ledger.label(tensor, kind)
    base = getattr(optimizer, "optimizer", optimizer)
    for tensor in _tensors(list(getattr(base, "state", {}).values())):
        ledger.label(tensor, _OPTIMIZER)
    for parameter in engine.module.parameters():
        ledger.label(getattr(parameter, "ds_tensor", parameter), _PARAMETERS)
        packed = getattr(parameter, "quant_state", None)  # the scales of 4-bit weights
        for scales in filter(None, (packed, getattr(packed, "state2", None))):
            for tensor in _tensors(list(vars(scales).values())):
                ledger.label(tensor, _PARAMETERS)
        if parameter.grad is not None:
            ledger.label(parameter.grad, _GRADIENTS)


def further_groups() -> int:
    """The number of this rank's process groups beside that of all ranks.

    Layers of experts make two, for expert and for data parallelism. AutoTP makes two, and one of them is further if
    there are ranks with the same part of a layer. Ulysses makes two, one of which was seen to take memory. hpZ makes
    that of the ranks of a node.
    """
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.utils import groups

    experts = len(groups._get_expert_parallel_group_dict()) + len(groups._get_expert_data_parallel_group_dict())
    is_split = groups._TENSOR_MODEL_PARALLEL_GROUP is not None
    shares_sequences = parallel_state_sp._SEQUENCE_PARALLEL_GROUP is not None
    has_copies = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP is not None
    return sum((experts, is_split and groups.get_data_parallel_world_size() > 1, shares_sequences, has_copies))


def optimizer_elements(engine: Any) -> int:
    """Elements that this rank's optimizer updates."""
    optimizer = engine.optimizer
    if sizes := getattr(optimizer, "fp16_partitioned_groups_flat_numel", None):  # stage 3, by sub-group
        return int(sum(sizes))
    for name in ("single_partition_of_fp32_groups", "fp32_groups_flat"):
        if tensors := list(_tensors(getattr(optimizer, name, None))):
            return int(sum(tensor.numel() for tensor in tensors))
    groups = getattr(optimizer, "optimizer", optimizer).param_groups
    return int(sum(tensor.numel() for group in groups for tensor in group["params"]))


def _tensors(value: Any, depth: int = 0) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if type(value).__name__.startswith("IPGBucket"):
        value, depth = list(vars(value).values()), depth + 1
    if isinstance(value, Mapping):
        value = list(value.values())
    if depth < 4 and isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, depth + 1)
