"""A small model that any config can train, for `toy_engine`."""

from __future__ import annotations

import torch

_WIDTH = 16


def build_model() -> torch.nn.Module:
    """Two linear layers."""
    return torch.nn.Sequential(torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.Linear(_WIDTH, _WIDTH))


def build_batch(micro_batch_size: int) -> tuple[torch.Tensor, ...]:
    """Ones of (micro_batch_size, 16)."""
    return (torch.ones(micro_batch_size, _WIDTH),)


def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The mean square of the output."""
    dtype = next(model.parameters()).dtype
    output: torch.Tensor = model(batch[0].to(dtype))
    return output.float().square().mean()
