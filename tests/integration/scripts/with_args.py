"""The style of DeepSpeed's own tutorials: argparse, `args=`, a loader of its own, --local_rank from the launcher."""

import argparse
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # counts if nobody has imported huggingface_hub before

import deepspeed
import torch
from huggingface_hub.constants import HF_HUB_OFFLINE
from torch.utils.data import DataLoader, TensorDataset

assert HF_HUB_OFFLINE
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, required=True)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--micro-batch", type=int, default=4)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--samples", type=int, default=4096)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()


class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(3)))

    def forward(self, x, y):
        return torch.nn.functional.mse_loss(self.layers(x), y)


deepspeed.init_distributed(dist_backend="nccl")
assert int(os.environ["LOCAL_RANK"]) == args.local_rank
torch.manual_seed(0)
data = TensorDataset(torch.randn(args.samples, args.width), torch.randn(args.samples, args.width))
loader = DataLoader(data, batch_size=args.micro_batch, shuffle=True)
model = Net(args.width)
engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for epoch in range(args.epochs):
    for x, y in loader:
        loss = engine(x.to(engine.device), y.to(engine.device))
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint("checkpoints", tag=f"epoch{epoch}")
print("trained")
