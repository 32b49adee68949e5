"""A GPT-2 of 4 layers × 256 (4.2M parameters), 128 random tokens a sample: for `autods fit` and for `train.py`."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY, SEQUENCE = 4096, 128


def build_model():
    return GPT2LMHeadModel(
        GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=VOCABULARY, n_positions=SEQUENCE, use_cache=False)
    )


def build_batch(micro_batch_size):
    tokens = torch.randint(0, VOCABULARY, (micro_batch_size, SEQUENCE))
    return {"input_ids": tokens, "labels": tokens}
