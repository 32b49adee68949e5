"""Qwen2 under ZeRO stage 0, 1, 2 or 3: a plain DeepSpeed script, which prints how much each rank's optimizer updates.

torchrun --nproc_per_node 2 examples/qwen2/train.py --deepspeed_config examples/qwen2/ds_zero1.json
"""

import argparse

import deepspeed
import torch
from model import SEQUENCE, Text, build_model
from torch.utils.data import DataLoader, DistributedSampler


def main():
    args = arguments()
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    model = build_model(args.model)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    engine, optimizer, _, _ = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=model.parameters(),
        # None: the config names one.
        optimizer=torch.optim.AdamW(model.parameters(), lr=args.lr) if args.own_optimizer else None,
    )
    print(
        f"Device {engine.local_rank} | ZeRO Stage: {engine.zero_optimization_stage()} | "
        f"Optimizer: lr={optimizer.param_groups[0]['lr']} | parameter count={elements(optimizer)}",
        flush=True,
    )
    dataset = Text(args.seq_len)
    sampler = DistributedSampler(dataset, seed=args.seed, drop_last=True)
    loader = DataLoader(dataset, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler, drop_last=True)
    train(engine, loader, args)
    if args.save_dir:
        engine.save_checkpoint(args.save_dir)
    torch.distributed.barrier()  # a rank that leaves early takes the others' connections with it
    torch.distributed.destroy_process_group()


def train(engine, loader, args):
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss
            engine.backward(loss)
            engine.step()
            if not engine.was_step_applied():  # in the middle of an accumulation
                continue
            if engine.global_rank == 0 and engine.global_steps % args.print_every == 0:
                print(f"epoch {epoch + 1}, step {engine.global_steps}: loss {loss.item():.4f}", flush=True)
            if engine.global_steps == args.max_steps:
                return


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="tiny, 0.5b, 1.5b or a folder with a config.json; else what QWEN2 says")
    parser.add_argument("--seq-len", type=int, default=SEQUENCE)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max-steps", type=int, help="stop after so many optimizer steps")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--own-optimizer", action="store_true", help="torch's AdamW, for a config that names none")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--save-dir", help="for a checkpoint at the end")
    parser.add_argument("--print-every", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local_rank", type=int, default=-1, help="the deepspeed launcher passes it")
    return deepspeed.add_config_arguments(parser).parse_args()


def elements(optimizer):
    """Of the parameters that this rank updates."""
    if hasattr(optimizer, "fp16_partitioned_groups_flat_numel"):  # stage 3 keeps them in sub-groups
        return sum(optimizer.fp16_partitioned_groups_flat_numel)
    return sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])


if __name__ == "__main__":
    main()
