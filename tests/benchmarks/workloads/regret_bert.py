"""A BERT whose vocabulary is most of its 3 million parameters: the optimizer's state decides what fits."""

import torch
from transformers import BertConfig, BertForMaskedLM


def build_model():
    shape = {"num_hidden_layers": 2, "hidden_size": 160, "intermediate_size": 640, "num_attention_heads": 4}
    return BertForMaskedLM(BertConfig(**shape, vocab_size=16384, max_position_embeddings=32))


def build_batch(micro_batch_size):
    tokens = torch.randint(0, 16384, (micro_batch_size, 8))
    return {"input_ids": tokens, "labels": tokens}
