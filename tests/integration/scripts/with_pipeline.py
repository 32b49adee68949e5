"""A plain DeepSpeed script of a pipeline: its engine takes its batches itself."""

import argparse

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule

WIDTH = 64

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--steps", type=int, default=100)
deepspeed.add_config_arguments(parser)
args = parser.parse_args()

deepspeed.init_distributed()
model = PipelineModule(
    layers=[LayerSpec(torch.nn.Linear, WIDTH, WIDTH) for _ in range(4)],
    num_stages=2,
    loss_fn=torch.nn.functional.mse_loss,
    partition_method="uniform",
)
samples = torch.randn(512, WIDTH)
engine, *_ = deepspeed.initialize(
    args=args,
    model=model,
    model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
    training_data=torch.utils.data.TensorDataset(samples, samples),
)
for _ in range(args.steps):
    engine.train_batch()
