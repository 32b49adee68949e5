"""A stream of samples that stops before the 57th until the file `open` lies in the folder of `--data`."""

import time
from pathlib import Path

import torch
from torch import nn

GATE = 56


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x):
        return (self.layers(x) - x).square().mean()


def build_model():
    torch.manual_seed(0)
    return Net()


def build_batch(micro_batch_size):
    return {"x": torch.randn(micro_batch_size, 8)}


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, folder):
        self.folder = folder

    def __iter__(self):
        number = 0
        while True:
            while number >= GATE and not (self.folder / "open").exists():
                time.sleep(0.05)
            generator = torch.Generator().manual_seed(number)
            yield {"x": torch.randn(8, generator=generator)}
            number += 1


def build_dataset(path):
    return Stream(Path(path))
