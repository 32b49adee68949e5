"""GPT-2 of 4 layers × 256 on random tokens: the model of the overhead figures."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def build_model():
    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=4096, use_cache=False))


def build_batch(micro_batch_size):
    tokens = torch.randint(0, 4096, (micro_batch_size, 64))
    return {"input_ids": tokens, "labels": tokens}
