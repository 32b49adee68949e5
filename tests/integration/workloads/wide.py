"""8.4M parameters and next to no activations: what a rung shards decides what it needs."""

import torch


class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))

    def forward(self, x):
        return self.layers(x).square().mean()


def build_model():
    return Wide()


def build_batch(micro_batch_size):
    return {"x": torch.ones(micro_batch_size, 1024)}
