"""Qwen2 with random weights, on the bytes of Python's own language reference.

autods fit examples/qwen2/model.py --gpus 2 --device cpu --gpu-memory 256MiB
QWEN2=1.5b autods plan examples/qwen2/model.py --gpus 2 --gpu-memory 32GiB --seq-len 1024

QWEN2 is tiny (without it), 0.5b, 1.5b, or a folder with a config.json.
"""

import functools
import os
import pathlib
import pydoc_data.topics

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

GEOMETRIES = pathlib.Path(__file__).resolve().parents[1] / "geometries"
SEQUENCE = 128


def build_model(name=None):
    name = name or os.environ.get("QWEN2", "tiny")
    folder = name if os.path.isdir(name) else GEOMETRIES / f"qwen2-{name}"
    config = Qwen2Config.from_pretrained(folder, use_cache=False)
    return Qwen2ForCausalLM(config)


def build_batch(micro_batch_size, seq_len=SEQUENCE):
    rows = [Text(seq_len)[row] for row in range(micro_batch_size)]
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


class Text(torch.utils.data.Dataset):
    """What `pydoc` says of Python, cut into rows; every byte is a token."""

    def __init__(self, seq_len=SEQUENCE):
        tokens = text()
        self.rows = tokens[: len(tokens) // seq_len * seq_len].view(-1, seq_len)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        tokens = self.rows[index % len(self.rows)].long()
        return {"input_ids": tokens, "labels": tokens}


@functools.cache
def text():
    """About 700 kB of English."""
    topics = "\n".join(pydoc_data.topics.topics.values())
    return torch.frombuffer(bytearray(topics.encode()), dtype=torch.uint8)
