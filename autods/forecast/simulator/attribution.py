"""What a block on the device is: parameters, gradients, optimizer, activations, buckets, other.

Told by who allocated it, and corrected by what it is known to be afterwards. Small blocks are told by the phase alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from .ledger import Ledger

KINDS = ("parameters", "gradients", "optimizer", "activations", "buckets", "other")
_PARAMETERS, _GRADIENTS, _OPTIMIZER, _ACTIVATIONS, _BUCKETS, _OTHER = range(len(KINDS))
_LARGE = 1 << 20  # bytes; below it, nobody looks for the caller
_BY_PHASE = {"init": _OPTIMIZER, "forward": _ACTIVATIONS, "backward": _ACTIVATIONS, "step": _OPTIMIZER}
# (file of DeepSpeed, part of the function's name) → kind; the first that matches the nearest frame wins.
_BY_CALLER = (
    ("partition_parameters.py", "", _PARAMETERS),
    ("partitioned_param_coordinator.py", "", _PARAMETERS),
    ("partitioned_param_swapper.py", "", _PARAMETERS),
    ("parameter_offload.py", "", _PARAMETERS),
    ("stage3.py", "bucket", _BUCKETS),
    ("stage3.py", "ipg", _BUCKETS),
    ("stage3.py", "reduce", _BUCKETS),
    ("stage3.py", "avg_scatter", _BUCKETS),
    ("stage3.py", "grad", _GRADIENTS),
    ("stage_1_and_2.py", "bucket", _BUCKETS),
    ("stage_1_and_2.py", "ipg", _BUCKETS),
    ("stage_1_and_2.py", "reduce", _BUCKETS),
    ("stage_1_and_2.py", "average", _BUCKETS),
    ("stage_1_and_2.py", "grad", _GRADIENTS),
    ("coalesced_collectives.py", "", _BUCKETS),
    ("engine.py", "allreduce", _BUCKETS),
    ("engine.py", "reduce", _BUCKETS),
    ("engine.py", "_configure_distributed_model", _PARAMETERS),
)
# Attributes of DeepSpeed's optimizers that hold what outlives a step.
_HELD = {
    _OPTIMIZER: (
        "single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat",
        "fp32_groups_flat_partition", "fp32_groups", "master_params",
    ),
    _GRADIENTS: ("averaged_gradients", "grad_partitions_flat_buffer", "all_grad_tensors", "fp32_groups_gradients"),
    _BUCKETS: ("ipg_buffer", "ipg_buckets"),
    _PARAMETERS: ("bit16_groups_flat", "fp16_groups_flat", "fp16_partitioned_groups_flat", "lp_param_buffer"),
}  # fmt: skip


class KindOfNew:
    """Asked at every allocation on the device."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __call__(self, size: int) -> int:
        usual = _BY_PHASE[self._ledger.phase]
        if size < _LARGE:
            return usual
        frame: Any = sys._getframe(3)
        while frame is not None:
            path = frame.f_code.co_filename
            if "/deepspeed/" in path:
                name = frame.f_code.co_name
                file = path.rpartition("/")[2]
                for wanted, part, kind in _BY_CALLER:
                    if file == wanted and part in name:
                        return kind
                return usual
            if "/autods/trial/act.py" in path:
                return _PARAMETERS if frame.f_code.co_name == "build" else usual
            frame = frame.f_back
        return usual


def watch_gradients(ledger: Ledger, model: Any) -> None:
    """Label the parameters' gradients when autograd hands them out."""

    def arrived(parameter: Any) -> None:
        if parameter.grad is not None:
            ledger.label(parameter.grad, _GRADIENTS)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(arrived)


def label(ledger: Ledger, engine: Any) -> None:
    """Label what outlives a step by where the engine holds it."""
    optimizer = engine.optimizer
    for kind, names in _HELD.items():
        for name in names:
            for tensor in _tensors(getattr(optimizer, name, None)):
                ledger.label(tensor, kind)
    base = getattr(optimizer, "optimizer", optimizer)
    for tensor in _tensors(list(getattr(base, "state", {}).values())):
        ledger.label(tensor, _OPTIMIZER)
    for parameter in engine.module.parameters():
        ledger.label(getattr(parameter, "ds_tensor", parameter), _PARAMETERS)
        if parameter.grad is not None:
            ledger.label(parameter.grad, _GRADIENTS)


def expert_groups() -> int:
    """Process groups of this rank that layers of experts made: of the ranks that share experts, and of equal ones."""
    from deepspeed.utils import groups

    return len(groups._get_expert_parallel_group_dict()) + len(groups._get_expert_data_parallel_group_dict())


def optimizer_elements(engine: Any) -> int:
    """Elements that this rank's optimizer updates."""
    optimizer = engine.optimizer
    sizes = getattr(optimizer, "fp16_partitioned_groups_flat_numel", None)  # stage 3: of its sub-groups
    if sizes:
        return int(sum(sizes))
    for name in ("single_partition_of_fp32_groups", "fp32_groups_flat"):
        tensors = list(_tensors(getattr(optimizer, name, None)))
        if tensors:
            return int(sum(tensor.numel() for tensor in tensors))
    base = getattr(optimizer, "optimizer", optimizer)
    return int(sum(tensor.numel() for group in base.param_groups for tensor in group["params"]))


def named(found: Mapping[int, int]) -> dict[str, int]:
    """Kinds by their names."""
    return {KINDS[kind]: size for kind, size in sorted(found.items())}


def _tensors(value: Any, depth: int = 0) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif depth < 4 and isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one, depth + 1)
    elif depth < 4 and isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one, depth + 1)
    elif depth < 4 and type(value).__name__.startswith("IPGBucket"):
        yield from _tensors(list(vars(value).values()), depth + 1)
