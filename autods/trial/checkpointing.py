"""Recomputing activations, by the protocol of Hugging Face's models."""

from __future__ import annotations

from typing import Any

# The name of transformers 5.2x and later, and the one before it.
_METHODS = ("activation_checkpointing_enable", "gradient_checkpointing_enable")


def can_checkpoint(model: Any) -> bool:
    """Whether the model has the method, and says that it works."""
    return any(hasattr(model, name) for name in _METHODS) and bool(
        getattr(model, "supports_gradient_checkpointing", True)
    )


def checkpoint(model: Any) -> None:
    """Let the model recompute its activations in backward."""
    next(getattr(model, name) for name in _METHODS if hasattr(model, name))()
