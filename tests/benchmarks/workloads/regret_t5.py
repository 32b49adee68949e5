"""A T5 of 2 + 2 layers × 128 on long sequences: the activations decide how large the micro batch may be."""

import torch
from transformers import T5Config, T5ForConditionalGeneration


def build_model():
    shape = {"num_layers": 2, "num_decoder_layers": 2, "d_model": 128, "d_ff": 512, "d_kv": 32, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**shape, vocab_size=512, decoder_start_token_id=0, use_cache=False))


def build_batch(micro_batch_size):
    tokens = torch.randint(0, 512, (micro_batch_size, 96))
    return {"input_ids": tokens, "labels": tokens}
