"""Next to no parameters; a sample of 2 MiB and more stays until the backward pass: the batch decides what is needed.

Where there is a folder `met` beside it, the first forward of each kind of sample waits for that of another kind.
"""

import os
import time
from pathlib import Path

import torch

MET = Path(__file__).with_name("met")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        if MET.is_dir():
            (MET / str(x.shape[1])).touch()
            began = time.monotonic()
            while len(os.listdir(MET)) < 2 and time.monotonic() - began < 60:
                time.sleep(0.01)
        return (x * self.layer.weight.sum()).exp().square().mean()


def build_model():
    return Net()


def build_batch(micro_batch_size, elements=2**19):
    return {"x": torch.zeros(micro_batch_size, elements)}
