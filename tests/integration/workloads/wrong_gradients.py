"""A perceptron under a ZeRO-2 that loses two thirds of each gradient, as DeepSpeed 0.17.6 to 0.18.2 did.

The first loss is right, and Adam takes steps of the same size.
"""

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

make = DeepSpeedZeroOptimizer.__init__


def make_faulty(self, *args, **kwargs):
    make(self, *args, **kwargs)
    if self.partition_gradients:
        for group in self.bit16_groups:
            for weight in group:
                weight.register_hook(lambda gradient: gradient / 3)


DeepSpeedZeroOptimizer.__init__ = make_faulty


def build_model():
    return Perceptron()


class Perceptron(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def forward(self, x, y):
        return torch.nn.functional.mse_loss(self.layers(x), y)


def build_batch(micro_batch_size):
    x = torch.randn(micro_batch_size, 16)
    return {"x": x, "y": x.sum(1, keepdim=True)}
