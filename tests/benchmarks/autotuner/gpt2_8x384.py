"""A GPT-2 of 8 layers × 384 (15.9M parameters), 256 random tokens a sample: for `autods fit` and for `train.py`."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY, SEQUENCE = 4096, 256


def build_model():
    return GPT2LMHeadModel(
        GPT2Config(n_layer=8, n_embd=384, n_head=6, vocab_size=VOCABULARY, n_positions=SEQUENCE, use_cache=False)
    )


def build_batch(micro_batch_size):
    tokens = torch.randint(0, VOCABULARY, (micro_batch_size, SEQUENCE))
    return {"input_ids": tokens, "labels": tokens}
