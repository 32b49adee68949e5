"""What the scripts of this folder train on: scanned digits, which lie here, or CIFAR-10 where you have it."""

import gzip
import pathlib
import pickle

import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

DIGITS = pathlib.Path(__file__).with_name("digits.csv.gz")


def load(cifar10=None):
    """Images of 3 × 32 × 32 in -1 to 1, and their classes, 0 to 9. cifar10: the folder `cifar-10-batches-py`."""
    return _cifar10(pathlib.Path(cifar10)) if cifar10 else _digits()


def _digits():
    with gzip.open(DIGITS, "rt") as file:
        rows = torch.tensor([[int(number) for number in line.split(",")] for line in file])
    grey = rows[:, :64].view(-1, 1, 8, 8).float() / 8 - 1  # they come as 0 to 16
    large = functional.interpolate(grey, size=(32, 32), mode="bilinear")
    return TensorDataset(large.expand(-1, 3, -1, -1), rows[:, 64])


def _cifar10(folder):
    batches = [pickle.loads(file.read_bytes(), encoding="bytes") for file in sorted(folder.glob("data_batch_*"))]
    images = torch.cat([torch.from_numpy(batch[b"data"]) for batch in batches]).view(-1, 3, 32, 32)
    classes = torch.tensor([one for batch in batches for one in batch[b"labels"]])
    return TensorDataset(images.float() / 127.5 - 1, classes)
