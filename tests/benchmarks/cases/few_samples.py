"""Wide layers with long chains of gates: a sample takes much memory and little arithmetic.

What a step costs whatever the batch (the optimizer, the gradients' exchange) is most of it, so who has room for more
samples is faster.
"""

import torch
from torch import nn

LAYERS, WIDTH, POSITIONS, GATES = 8, 1024, 4, 120


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
            for _ in range(GATES):
                x = nn.functional.leaky_relu(x, 0.99)
        return (x.float() - y).square().mean()


def build_model():
    return Gated()


def build_batch(micro_batch_size):
    shape = (micro_batch_size, POSITIONS, WIDTH)
    return {"x": torch.randn(shape, dtype=torch.bfloat16), "y": torch.randn(shape)}
