"""The loss is the weight itself: how far it has fallen tells how many micro batches were trained, at a rate of 1."""

import torch


class Weight(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((64,), 8.0))

    def forward(self, x):
        return (self.weight * x).sum() / x.sum()


def build_model():
    return Weight()


def build_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=64.0)  # the gradient of each of the 64 is 1/64


def build_batch(micro_batch_size):
    return {"x": torch.ones(micro_batch_size, 64)}
