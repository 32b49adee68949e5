"""A script with a batch of its own, whose loss is of the tokens that two masks choose, as ms-swift's is."""

import deepspeed
import torch

config = {"train_micro_batch_size_per_gpu": 3, "bf16": {"enabled": True}}
config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
model = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(9):
    tokens = torch.randint(0, 50, (3, 8), device=engine.device)
    labels = torch.where(torch.arange(8, device=engine.device) < 2, -100, tokens)
    chosen = (labels != -100).flatten()
    targets = torch.nn.functional.pad(labels.flatten()[chosen], (1, 0), value=-100)
    kept = torch.nn.functional.pad(chosen[1:], (0, 1), value=True)
    logits = engine(tokens).flatten(0, 1)[kept]
    engine.backward(torch.nn.functional.cross_entropy(logits.float(), targets))
    engine.step()
