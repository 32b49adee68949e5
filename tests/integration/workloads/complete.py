"""Everything that a workload may define: its own optimizer, loss and DeepSpeed config."""

import torch

DEEPSPEED_CONFIG = {"gradient_clipping": 0.5, "bf16": {"enabled": True}}


def build_model():
    return torch.nn.Linear(16, 1)


def build_batch(micro_batch_size):
    return torch.ones(micro_batch_size, 16), torch.zeros(micro_batch_size, 1)


def build_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def loss(model, batch):
    inputs, wanted = batch
    return torch.nn.functional.mse_loss(model(inputs), wanted)
