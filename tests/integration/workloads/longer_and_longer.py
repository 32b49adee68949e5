"""Samples of `--data` tokens after the 48th: a fit does not see them, a run does. With 0 there is a bug instead."""

import time

import torch
from torch import nn

SHORT, GROWS_AT = 32, 48
FORWARD_S = 0.04  # whatever the batch: a larger micro batch is faster on a busy machine, too
WIDTH = 256


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(128, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.out = nn.Linear(WIDTH, 128)

    def forward(self, tokens, mask):
        time.sleep(FORWARD_S)
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        losses = nn.functional.cross_entropy(self.out(hidden).transpose(1, 2), tokens, reduction="none")
        return ((losses * mask).sum(1) / mask.sum(1)).mean()


def build_model():
    torch.manual_seed(0)
    return Net()


def build_batch(micro_batch_size):
    tokens = torch.randint(0, 128, (micro_batch_size, SHORT))
    return {"tokens": tokens, "mask": torch.ones(micro_batch_size, SHORT)}


class Stream(torch.utils.data.IterableDataset):
    """Endless; it can only be read in order."""

    def __init__(self, long):
        self.long = long

    def __iter__(self):
        number = 0
        while True:
            generator = torch.Generator().manual_seed(number)
            length = self.long if number >= GROWS_AT else SHORT
            if not length:
                raise KeyError("a column that is not there")
            yield torch.randint(0, 128, (length,), generator=generator)
            number += 1


def build_dataset(path):
    return Stream(int(path))


def collate(samples):
    tokens = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    lengths = torch.tensor([len(sample) for sample in samples])
    mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).float()
    return {"tokens": tokens, "mask": mask}
