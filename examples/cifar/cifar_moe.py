"""The conv net with a mixture of experts in its middle, through `deepspeed.moe`.

torchrun --nproc_per_node 2 examples/cifar/cifar_moe.py --deepspeed_config examples/cifar/ds_config.json --ep-size 2
"""

import argparse

import deepspeed
import images
import torch
from cifar import Net
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn
from torch.nn import functional


class MoENet(Net):
    def __init__(self, experts, ep_size, top_k):
        super().__init__()
        # DeepSpeed asks for more images a batch than min_capacity, which is 4 unless we say so.
        self.moe = MoE(84, nn.Linear(84, 84), num_experts=experts, ep_size=ep_size, k=top_k, min_capacity=0)

    def forward(self, pictures):
        hidden = self.hidden(self.convolutions(pictures).flatten(1))
        mixed, balance, _ = self.moe(hidden)
        return self.classes(hidden + functional.relu(mixed)), balance


def main():
    args = arguments()
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    model = MoENet(args.experts, args.ep_size, args.top_k)
    # An expert's parameters are reduced over the ranks that hold the same expert, so they need a group of their own.
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "parameters"}
    )
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=groups, training_data=images.load(args.cifar10)
    )
    train(engine, loader, args)
    if args.save_dir:
        engine.save_checkpoint(args.save_dir)
    torch.distributed.barrier()  # a rank that leaves early takes the others' connections with it
    torch.distributed.destroy_process_group()


def train(engine, loader, args):
    dtype = next(engine.parameters()).dtype
    for epoch in range(args.epochs):
        for pictures, classes in loader:
            logits, balance = engine(pictures.to(engine.device, dtype))
            loss = functional.cross_entropy(logits.float(), classes.to(engine.device)) + args.balance * balance
            engine.backward(loss)
            engine.step()
            if engine.global_rank == 0:
                print(f"epoch {epoch + 1}, step {engine.global_steps}: loss {loss.item():.4f}", flush=True)
            if engine.global_steps == args.max_steps:
                return


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--ep-size", type=int, default=1, help="ranks that share the experts among them")
    parser.add_argument("--top-k", type=int, default=1, help="experts that each image goes to, 1 or 2")
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the experts' balance in the loss")
    parser.add_argument("--cifar10", help="the folder cifar-10-batches-py; else the digits that lie beside this script")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max-steps", type=int, help="stop after so many optimizer steps")
    parser.add_argument("--save-dir", help="for a checkpoint at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local_rank", type=int, default=-1, help="the deepspeed launcher passes it")
    return deepspeed.add_config_arguments(parser).parse_args()


if __name__ == "__main__":
    main()
