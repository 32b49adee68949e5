"""A small model that takes a while for each sample, writes down what it trains on, and meets a fault in a run.

Each rank appends [micro batch, samples] to seen.<pid> in its attempt's folder for every micro batch. The fault stands
in `strike.json` in the run's folder: {"fault": one of FAULTS, "rank": r}; the rank removes it and meets it once.
"""

import contextlib
import json
import os
import shutil
import time
from pathlib import Path

import torch
from torch import nn

WIDTH, SAMPLES, SAMPLE_S = 512, 96, 0.025


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(SAMPLES, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, sample, target):
        meet_fault("forward")
        note_samples(sample)
        time.sleep(SAMPLE_S * len(sample))
        hidden = self.embed(sample)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return (hidden.mean(1) - target).square().mean()

    def state_dict(self, *args, **kwargs):  # the engine saves
        meet_fault("save")
        return super().state_dict(*args, **kwargs)


def build_model():
    torch.manual_seed(0)
    return Net()


def build_batch(micro_batch_size):
    return {"sample": torch.arange(micro_batch_size), "target": torch.ones(micro_batch_size)}


def build_dataset(path):
    return [{"sample": number, "target": float(number % 7)} for number in range(SAMPLES)]


def collate(samples):
    return {key: torch.tensor([sample[key] for sample in samples]) for key in samples[0]}


def attempt_folder():
    """The folder of the run's attempt; None in a trial of a fit."""
    job = os.environ.get("AUTODS_RUN")
    return None if job is None else Path(job).parent


def note_samples(sample):
    if (folder := attempt_folder()) is not None:
        with open(folder / f"seen.{os.getpid()}", "a") as file:
            file.write(json.dumps(sample.tolist()) + "\n")


def meet_fault(place):
    if (folder := attempt_folder()) is None:
        return
    path = folder.parents[1] / "strike.json"
    with contextlib.suppress(OSError, ValueError):
        strike = json.loads(path.read_text())
        fault, where = FAULTS[strike["fault"]]
        if strike["rank"] == int(os.environ["RANK"]) and where == place:
            os.replace(path, path.with_name("struck.json"))
            fault(folder.parents[1])


def fill_device(run):
    """Take memory of the device until it is refused."""
    kept = []
    while True:
        kept.append(torch.ones(2**20))


def fill_host(run):
    """Take memory until the kernel's killer strikes. In a full cgroup it may refuse some first."""
    kept = []
    while True:
        with contextlib.suppress(MemoryError):
            kept.append(b"x" * 2**22)


def fill_disk(run):
    """Take all of the run's disk, as somebody else's files would."""
    with open(run / "ballast", "wb") as file:
        size = shutil.disk_usage(run).free
        while size >= 4096:
            try:
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), size)
            except OSError:
                size //= 2


FAULTS = {
    "device": (fill_device, "forward"),
    "host": (fill_host, "forward"),
    "disk": (fill_disk, "forward"),
    "disk in a save": (fill_disk, "save"),
}
