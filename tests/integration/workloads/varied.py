"""Its loss tells what it was called with: the environment, the arguments of both functions, the batch."""

import os

import torch


class Varied(torch.nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.depth = depth
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(depth))

    def forward(self, tokens):
        touched = sum(layer.weight.sum() for layer in self.layers) * 0
        told = 10_000 * len(tokens) + 100 * tokens.shape[1] + 10 * self.depth + float(os.environ.get("PROBED", "7"))
        return touched + told


def build_model(depth=1):
    if depth > 4:
        raise ValueError(f"{depth} layers are too many")
    return Varied(depth)


def build_batch(micro_batch_size, seq_len=8):
    return {"tokens": torch.zeros(micro_batch_size, seq_len, dtype=torch.int64)}


def build_longest_batch(micro_batch_size):
    return build_batch(micro_batch_size, 64)
