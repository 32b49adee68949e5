"""A small GPT-2 on texts of 32 tokens, and now and then one of 256: training may meet more than it usually sees."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

SHORT, LONG, VOCABULARY = 32, 256, 512


def build_model():
    return GPT2LMHeadModel(
        GPT2Config(n_layer=3, n_embd=128, n_head=4, n_positions=LONG, vocab_size=VOCABULARY, use_cache=False)
    )


def build_batch(micro_batch_size):
    return batch_of(micro_batch_size, SHORT)


def build_longest_batch(micro_batch_size):
    return batch_of(micro_batch_size, LONG)


def batch_of(samples, length):
    tokens = torch.randint(0, VOCABULARY, (samples, length))
    return {"input_ids": tokens, "labels": tokens}
