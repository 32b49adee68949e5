"""A layer of four experts, two on each of two ranks."""

import torch
from deepspeed.moe.layer import MoE

WIDTH = 32


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = torch.nn.Linear(WIDTH, WIDTH)
        expert = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.ReLU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )
        self.experts = MoE(WIDTH, expert, num_experts=4, ep_size=2, k=1)

    def forward(self, samples):
        hidden, balance, _ = self.experts(self.enter(samples))
        return torch.nn.functional.mse_loss(hidden, samples) + 0.01 * balance


def build_model():
    return Experts()


def build_batch(micro_batch_size):
    return {"samples": torch.randn(micro_batch_size, 8, WIDTH)}
