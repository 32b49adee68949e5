"""A large model's way: built under `deepspeed.zero.Init`, a language model of transformers, the loss in its output."""

import json
import sys

import deepspeed
import torch
from transformers import GPT2Config, GPT2LMHeadModel

config = json.load(open(sys.argv[1]))
config["gradient_clipping"] = 1.0
deepspeed.init_distributed()
with deepspeed.zero.Init(config_dict_or_path=config):
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
micro_batch = engine.train_micro_batch_size_per_gpu()
for _ in range(1000):
    ids = torch.randint(0, 64, (micro_batch, 16), device=engine.device)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
