"""A small GPT-2 with a broken knob: where the config says "skips_half", half of each batch is left out.

That is faster, and trains something else. The knob stands in strategies/planted.toml.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

LENGTH, VOCABULARY = 64, 512


def build_model():
    return GPT2LMHeadModel(
        GPT2Config(n_layer=3, n_embd=128, n_head=4, n_positions=LENGTH, vocab_size=VOCABULARY, use_cache=False)
    )


def build_batch(micro_batch_size):
    tokens = torch.randint(0, VOCABULARY, (micro_batch_size, LENGTH))
    return {"input_ids": tokens, "labels": tokens}


def loss(engine, batch):
    tokens = batch["input_ids"]
    if engine.config.get("skips_half"):
        tokens = tokens[:, : LENGTH // 2]
    return engine(input_ids=tokens, labels=tokens).loss
