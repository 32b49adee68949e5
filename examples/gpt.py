"""A GPT-2 on the bytes of real text: Python's own standard library, which every machine has.

autods fit examples/gpt.py --gpus 2 --device cpu --gpu-memory 488MiB --precision fp32
"""

import functools
import pathlib
import random
import sysconfig

import torch
from transformers import GPT2Config, GPT2LMHeadModel

SEQUENCE = 64


def build_model(n_layer=10):
    """32.6M parameters: small for a GPU, large enough to fill a CPU rank's budget of some hundred MiB."""
    sizes = {"n_layer": n_layer, "n_embd": 512, "n_head": 8, "vocab_size": 2048, "n_positions": 128}
    config = GPT2Config(**sizes, use_cache=False, bos_token_id=None, eos_token_id=None)
    model = GPT2LMHeadModel(config)
    model.gradient_checkpointing_enable()
    return model


def build_batch(micro_batch_size, seq_len=SEQUENCE):
    """Random windows of the text; every byte is a token."""
    data = text()
    starts = [random.randrange(len(data) - seq_len) for _ in range(micro_batch_size)]
    tokens = torch.tensor([list(data[start : start + seq_len]) for start in starts])
    return {"input_ids": tokens, "labels": tokens}


@functools.cache
def text():
    """About 800 kB of English and Python."""
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    return b"".join(path.read_bytes() for path in sorted(library.glob("*.py"))[:40])
