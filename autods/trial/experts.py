"""Layers of experts, `deepspeed.moe.layer.MoE`."""

from __future__ import annotations

from typing import Any


def is_moe(module: Any) -> bool:
    """Whether this module is one; DeepSpeed need not be imported for it."""
    return type(module).__name__ == "MoE" and isinstance(getattr(module, "num_experts", None), int)


def experts_of(model: Any) -> int:
    """Of its largest layer; 0: it has none."""
    return max((module.num_experts for module in model.modules() if is_moe(module)), default=0)
