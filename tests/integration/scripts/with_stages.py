"""A pipeline of two stages, which one rank alone cannot build; `train_batch` is its whole step."""

import sys

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from helper import build

deepspeed.init_distributed()
model, data = build(16)
net = PipelineModule(layers=list(model), loss_fn=torch.nn.functional.mse_loss, num_stages=2)
engine, *_ = deepspeed.initialize(
    model=net, model_parameters=[p for p in net.parameters() if p.requires_grad], training_data=data, config=sys.argv[1]
)
for _ in range(1000):
    engine.train_batch()
