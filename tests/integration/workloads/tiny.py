"""The smallest workload that is one: a two-layer perceptron that returns its loss."""

import torch


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def forward(self, x, y):
        return torch.nn.functional.mse_loss(self.layers(x), y)


def build_model():
    return Tiny()


def build_batch(micro_batch_size):
    return {"x": torch.ones(micro_batch_size, 16), "y": torch.zeros(micro_batch_size, 1)}
