"""The model and the samples of the scripts here, and what each rank writes down about its steps."""

import argparse
import hashlib
import json
import os
import signal
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

TOKENS = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(0))
TOKENS[:, 0] = torch.arange(64)  # a sample's number
PROBE = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--batch_size", type=int)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--log", required=True)
    return parser.parse_args()


def make_config():
    size = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
    return GPT2Config(**size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def make_model():
    return GPT2LMHeadModel(make_config())


def note_build(folder, model):
    """Note how much of the model this rank holds after its build: of a partitioned weight nothing is there."""
    weights = list(model.parameters())
    row = {
        "held": sum(weight.numel() for weight in weights),
        "split": sum(hasattr(weight, "ds_id") for weight in weights),
    }
    with open(Path(folder) / f"build{os.environ['RANK']}.jsonl", "a") as file:
        print(json.dumps(row), file=file)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return len(TOKENS)

    def __getitem__(self, index):
        return {"input_ids": TOKENS[index], "labels": TOKENS[index]}


class Evidence:
    """A line for each micro batch. Rank 1 dies once, when it begins the seventh step, if it `dies`."""

    def __init__(self, folder, *, dies=True):
        self.folder, self.rank, self.dies = Path(folder), int(os.environ["RANK"]), dies
        self.file = open(self.folder / f"rank{self.rank}.jsonl", "a")

    def note(self, engine, batch):
        """Before the forward of a micro batch: its samples, and what the weights make of the same samples always."""
        step, killed = engine.global_steps + 1, self.folder / "killed"
        if self.dies and self.rank == 1 and step == 7 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with torch.no_grad():
            probe = engine.module.forward(input_ids=PROBE, labels=PROBE).loss
        row = {"step": step, "engine": type(engine).__name__, "samples": batch[:, 0].tolist(), "probe": float(probe)}
        row["random"] = hashlib.sha1(torch.get_rng_state().numpy().tobytes()).hexdigest()
        print(json.dumps(row), file=self.file, flush=True)
