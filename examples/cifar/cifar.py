"""A small conv net under DeepSpeed, which makes the data loader itself (`training_data=`).

torchrun --nproc_per_node 2 examples/cifar/cifar.py --deepspeed_config examples/cifar/ds_config.json
"""

import argparse

import deepspeed
import images
import torch
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.hidden = nn.Sequential(nn.Linear(32 * 5 * 5, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU())
        self.classes = nn.Linear(84, 10)

    def forward(self, pictures):
        return self.classes(self.hidden(self.convolutions(pictures).flatten(1)))


def main():
    args = arguments()
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    model = Net()
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=images.load(args.cifar10)
    )
    train(engine, loader, args)
    if args.save_dir:
        engine.save_checkpoint(args.save_dir)
    torch.distributed.barrier()  # a rank that leaves early takes the others' connections with it
    torch.distributed.destroy_process_group()


def train(engine, loader, args):
    dtype = next(engine.parameters()).dtype
    for epoch in range(args.epochs):
        right = seen = 0
        for pictures, classes in loader:
            pictures, classes = pictures.to(engine.device, dtype), classes.to(engine.device)
            logits = engine(pictures)
            loss = functional.cross_entropy(logits.float(), classes)
            engine.backward(loss)
            engine.step()
            right += (logits.argmax(dim=1) == classes).sum().item()
            seen += len(classes)
            if engine.global_rank == 0:
                print(f"epoch {epoch + 1}, step {engine.global_steps}: loss {loss.item():.4f}", flush=True)
            if engine.global_steps == args.max_steps:
                return
        if engine.global_rank == 0:
            print(f"epoch {epoch + 1}: {right / seen:.1%} right", flush=True)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar10", help="the folder cifar-10-batches-py; else the digits that lie beside this script")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max-steps", type=int, help="stop after so many optimizer steps")
    parser.add_argument("--save-dir", help="for a checkpoint at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local_rank", type=int, default=-1, help="the deepspeed launcher passes it")
    return deepspeed.add_config_arguments(parser).parse_args()


if __name__ == "__main__":
    main()
