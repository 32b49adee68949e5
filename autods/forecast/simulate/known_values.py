"""Integers of a batch that simulated tensors carry along: the sizes of its images, and the tokens that stand for them.

A model of images and text, such as Qwen3-VL, computes shapes from them. Other values of a batch decide no shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from ...rank.model_facts import named_tensors

_VALUE = "autods_value"  # attribute of a fake tensor: the real one with its values
_MOST_ELEMENTS = 1 << 20  # of a result in memory; a view has none
# Operators whose result is known where their tensors are.
_CARRIERS = frozenset({
    "alias", "detach", "lift_fresh", "lift_fresh_copy", "_to_copy", "clone", "arange", "full", "zeros", "ones",
    "new_full", "new_zeros", "new_ones", "full_like", "zeros_like", "ones_like", "select", "slice", "unbind", "split",
    "split_with_sizes", "view", "_unsafe_view", "unsqueeze", "squeeze", "expand", "t", "transpose", "permute", "cat",
    "stack", "repeat", "repeat_interleave", "constant_pad_nd", "flip", "roll", "index", "index_select", "gather",
    "masked_select", "nonzero", "where", "eq", "ne", "gt", "ge", "lt", "le", "bitwise_not", "bitwise_and",
    "bitwise_or", "logical_not", "logical_and", "logical_or", "any", "all", "sum", "prod", "cumsum", "diff", "max",
    "min", "amax", "amin", "argsort", "sort", "mul", "add", "sub", "neg", "clamp", "floor_divide", "remainder",
})  # fmt: skip
_OF_THE_DEVICE = ("device", "pin_memory", "non_blocking")
_changed: set[int] = set()  # addresses of values that simulated tensors no longer have, nor views of them


class _Unknown(Exception):
    """A tensor has no known values."""


def attach(batch: Any, build_batch: Callable[[int], Any], micro_batch: int) -> bool:
    """Attach values to the integers of a simulated batch that has images or sounds beside them; whether it did.

    Each sample gets those of one real sample: all have the worst shape. Nothing is attached where `build_batch` does
    not run without the GPU, or where its shapes differ.
    """
    tensors = named_tensors(batch)
    integers = {name: tensor for name, tensor in tensors.items() if not tensor.is_floating_point() and tensor.dim()}
    if not integers or len(integers) == len(tensors):
        return False
    try:
        with _disable_current_modes():
            sample = named_tensors(build_batch(1))
            values = {name: torch.cat([sample[name]] * micro_batch) for name in integers}
    except Exception:  # user code raises anything
        return False
    for name, tensor in integers.items():
        if (values[name].shape, values[name].dtype) == (tensor.shape, tensor.dtype):
            setattr(tensor, _VALUE, values[name])
    return True


def find_value(tensor: Any) -> Any:
    """Return the real tensor of these values; None where they are not known. FakeTensorMode holds small constants."""
    if type(tensor) is torch.Tensor:
        return tensor if tensor.is_cpu else None  # of a list, before it becomes a fake tensor
    value = vars(tensor).get(_VALUE, tensor.constant) if type(tensor) is FakeTensor else None
    return None if value is None or value.untyped_storage().data_ptr() in _changed else value


def count_ones(mask: Any) -> int | None:
    """How many elements of a mask are true; None where that is not known."""
    if (value := find_value(mask)) is None:
        return None
    with _disable_current_modes():
        times = 1
        for dimension in reversed(range(value.dim())):
            if value.stride(dimension) == 0 and value.shape[dimension]:  # expanded: all are alike
                times *= value.shape[dimension]
                value = value.select(dimension, 0)
        return times * int(value.count_nonzero())


def compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the real results of an operator; None where a value is not known."""
    try:
        real = tree_map_only(torch.Tensor, _read, args)
    except _Unknown:
        return None
    with _disable_current_modes():
        return func(*real, **{name: item for name, item in kwargs.items() if name not in _OF_THE_DEVICE})


def _read(tensor: Any) -> Any:
    if (value := find_value(tensor)) is None:
        raise _Unknown
    return value


def carry(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Attach values to the results of an operator whose tensors have them, or change those in place."""
    if func._schema.is_mutable:
        value = find_value(args[0]) if args and hasattr(args[0], _VALUE) else None
        if value is not None and compute(func, args, kwargs) is None:  # else the real one and its views changed alike
            _changed.add(value.untyped_storage().data_ptr())
        return
    if func._schema.name.partition("::")[2] not in _CARRIERS:
        return
    outputs = tree_leaves(out)
    if not func.is_view and sum(each.numel() for each in outputs) > _MOST_ELEMENTS:
        return
    if (results := compute(func, args, kwargs)) is not None:
        for fake, result in zip(outputs, tree_leaves(results), strict=True):
            give(fake, result)


def give(fake: Any, value: Any) -> None:
    """Attach the values of a real tensor to a simulated one."""
    if value._base is None:
        _changed.discard(value.untyped_storage().data_ptr())  # an address that is used again
    setattr(fake, _VALUE, value)
