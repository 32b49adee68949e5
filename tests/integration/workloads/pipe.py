"""A pipeline of two stages; samples that differ, so that stages which took different ones would be seen."""

import torch
from deepspeed.pipe import LayerSpec, PipelineModule

WIDTH = 64


def build_model():
    layers = [LayerSpec(torch.nn.Linear, WIDTH, WIDTH) for _ in range(4)]
    return PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss, partition_method="uniform")


def build_batch(micro_batch_size):
    samples = torch.randn(micro_batch_size, WIDTH)
    return samples, samples.flip(-1)
