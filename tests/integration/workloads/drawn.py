"""A model of 16 million weights with dropout, and batches that are drawn: all of it depends on the seed."""

import torch


class Drawn(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(1024, 8192), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(8192, 1024)
        )

    def forward(self, x, y):
        return torch.nn.functional.mse_loss(self.layers(x), y)


def build_model():
    return Drawn()


def build_batch(micro_batch_size):
    return {"x": torch.randn(micro_batch_size, 1024), "y": torch.randn(micro_batch_size, 1024)}
