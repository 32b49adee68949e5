"""The model of DeepSpeedExamples' training/bf16_master_weight: nn.MultiheadAttention with weights, under autocast."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Attention and MLP, each before a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.norm_1(hidden + self.attention(hidden, hidden, hidden)[0])
        normed: torch.Tensor = self.norm_2(hidden + self.mlp(hidden))
        return normed


class PostNorm(nn.Module):
    """A model that returns its loss."""

    def __init__(self, width: int, layers: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.out = nn.Linear(width, vocabulary)
        self.recompute = False

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        self.recompute = True

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(input_ids.device.type, torch.bfloat16):
            return self._compute_loss(input_ids)

    def _compute_loss(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.recompute else block(hidden)
        logits = self.out(hidden)
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), input_ids.view(-1))


def build_model(width: int, layers: int, heads: int, vocabulary: int, length: int) -> PostNorm:
    """The sizes are those of the source's run."""
    return PostNorm(width, layers, heads, vocabulary, length)


def build_batch(micro_batch_size: int, vocabulary: int, length: int) -> dict[str, torch.Tensor]:
    """Random tokens."""
    return {"input_ids": torch.randint(0, vocabulary, (micro_batch_size, length))}
