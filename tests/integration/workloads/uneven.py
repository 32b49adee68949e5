"""A perceptron whose forward takes 30 ms, and in rank 1 `SLOWER` times as long."""

import os
import time

import torch


class Uneven(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.seconds = 0.03 * (float(os.environ.get("SLOWER", "1")) if os.environ["RANK"] == "1" else 1.0)
        self.layer = torch.nn.Linear(16, 1)

    def forward(self, x, y):
        time.sleep(self.seconds)
        return torch.nn.functional.mse_loss(self.layer(x), y)


def build_model():
    return Uneven()


def build_batch(micro_batch_size):
    return {"x": torch.ones(micro_batch_size, 16), "y": torch.zeros(micro_batch_size, 1)}


def build_dataset(path):
    return [{"x": torch.ones(16), "y": torch.zeros(1)} for _ in range(64)]
