"""A model.py of which only the last layer trains: the build decides what it needs."""

from __future__ import annotations

_CODE = """
import torch
from torch import nn

WIDTH, LAYERS = {width}, {layers}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.layers[:-1].requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()

def build_model():
    return Net()

def build_batch(micro_batch_size):
    return (torch.ones(micro_batch_size, WIDTH),)
"""


def frozen_model(*, width: int, layers: int) -> str:
    """Its text, of layers of `width` × `width` without a bias."""
    return _CODE.format(width=width, layers=layers)
