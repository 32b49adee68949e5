"""GPT-2 as it was published, 124 million parameters, on random tokens: a model whose build takes seconds."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def build_model():
    return GPT2LMHeadModel(GPT2Config(use_cache=False))


def build_batch(micro_batch_size):
    tokens = torch.randint(0, 50257, (micro_batch_size, 64))
    return {"input_ids": tokens, "labels": tokens}
