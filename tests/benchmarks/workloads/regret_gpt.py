"""GPT-2 of 2 layers × 128 on random tokens: small enough that everything fits, and steps are mostly overhead."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def build_model():
    return GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=128, n_head=4, n_positions=64, vocab_size=1024, use_cache=False)
    )


def build_batch(micro_batch_size):
    tokens = torch.randint(0, 1024, (micro_batch_size, 32))
    return {"input_ids": tokens, "labels": tokens}
