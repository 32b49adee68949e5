"""A small model that keeps 32 MiB of each forward pass in training."""

import torch


class Leaking(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)
        self.kept = []

    def forward(self, x):
        if self.training:
            self.kept.append(torch.ones(2**23))
        return self.layer(x).square().mean()


def build_model():
    return Leaking()


def build_batch(micro_batch_size):
    return {"x": torch.ones(micro_batch_size, 16)}
