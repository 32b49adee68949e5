"""The repeated layers of a model: found as a list of modules that are alike, and left out for an estimate."""

from __future__ import annotations

from collections import Counter
from typing import Any

_FEWEST = 4  # a list of fewer is not what makes a model deep


def layers_of(model: Any) -> tuple[int, int]:
    """How many layers repeat in the deepest stack, and the parameters of one; (0, 0) when none do.

    A model with two stacks of one depth (an encoder and a decoder) counts a layer of each. Stacks of other depths: none
    is found, because no one number says how deep such a model is.
    """
    stacks = _stacks(model)
    depths = {len(stack) for stack in stacks}
    if len(depths) != 1:
        return 0, 0
    return depths.pop(), sum(sum(parameter.numel() for parameter in stack[-1].parameters()) for stack in stacks)


def shorten(model: Any, layers: int) -> None:
    """Keep the first `layers` of each stack."""
    for stack in _stacks(model):
        del stack[layers:]


def _stacks(model: Any) -> list[Any]:
    """The outermost lists of modules that are alike, but for a first or last one that differs."""
    import torch

    found: list[Any] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or not isinstance(module, torch.nn.ModuleList) or len(module) < _FEWEST:
            continue
        inside.update(id(inner) for inner in module.modules())
        shapes = Counter(_shape(child) for child in module)
        if shapes.most_common(1)[0][1] >= len(module) - 1:
            found.append(module)
    return found


def _shape(module: Any) -> tuple[Any, ...]:
    return (type(module), *((name, tuple(parameter.shape)) for name, parameter in module.named_parameters()))
