"""Mostly short texts, sometimes a long one; it drops out, and needs sixteen times the memory to evaluate."""

import torch

SHORT, LONG, WIDTH = 64, 65536, 256


class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Parameter(torch.randn(WIDTH) / 16)
        self.dropout = torch.nn.Dropout(0.5)
        self.layers = torch.nn.Sequential(torch.nn.Linear(WIDTH, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 1))

    def forward(self, x, y):
        # Counted by the budget, touched by nobody: what takes memory here takes no time.
        workspace = torch.empty(x.numel() * (512 if self.training else 16 * 512), dtype=torch.uint8)
        seen = torch.tanh(x.mean(1, keepdim=True) * self.wide)
        loss = torch.nn.functional.mse_loss(self.layers(self.dropout(seen)), y)
        del workspace
        return loss


def build_model():
    return Reader()


def build_batch(micro_batch_size):
    return batch_of(micro_batch_size, SHORT)


def build_longest_batch(micro_batch_size):
    return batch_of(micro_batch_size, LONG)


def batch_of(samples, length):
    x = torch.randn(samples, length) + torch.randn(samples, 1)
    return {"x": x, "y": x[:, :1].clone()}
