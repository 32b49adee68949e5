"""A GPT-2 whose samples become four times as long in the middle of a run: what a fit proved is then not enough.

AUTODS_KIT_WIDTH, AUTODS_KIT_LAYERS and AUTODS_KIT_WORDS set its size; 1280, 36 and 50257 are GPT-2 774M.
"""

import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel

WIDTH, LAYERS = int(os.environ.get("AUTODS_KIT_WIDTH", "1280")), int(os.environ.get("AUTODS_KIT_LAYERS", "36"))
WORDS = int(os.environ.get("AUTODS_KIT_WORDS", "50257"))
SHORT, LONG = 256, 1024
LONG_FROM = 64  # samples


def build_model():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_embd=WIDTH, n_layer=LAYERS, n_head=max(1, WIDTH // 64)))


def make_batch(tokens):
    return {"input_ids": tokens, "labels": tokens}


def build_batch(micro_batch_size):
    return make_batch(torch.randint(0, WORDS, (micro_batch_size, SHORT)))


def build_dataset(path):
    lengths = [SHORT if number < LONG_FROM else LONG for number in range(4 * LONG_FROM)]
    return [torch.arange(length) * (number + 1) % WORDS for number, length in enumerate(lengths)]


def collate(samples):
    longest = max(map(len, samples))
    return make_batch(torch.stack([torch.nn.functional.pad(each, (0, longest - len(each))) for each in samples]))
