"""Pre-training of a GPT-2 with DeepSpeed: the engine, optimizer and schedule are the config's, the loop is this.

cd examples/pretrain_script
CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2 deepspeed_pretrain.py
torchrun --nproc_per_node 2 deepspeed_pretrain.py --config ds_config_cpu.json

The last line is for CPU ranks. Its config says bf16, since few CPUs have fp16, and has no monitors that need a package.
"""

import argparse
import pathlib
import sysconfig

import deepspeed
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel

HERE = pathlib.Path(__file__).resolve().parent
BYTES = 256


class Code(Dataset):
    """Python's own standard library, cut into rows; every byte is a token."""

    def __init__(self, seq_len):
        library = pathlib.Path(sysconfig.get_paths()["stdlib"])
        code = b"".join(file.read_bytes() for file in sorted(library.glob("*.py")))
        tokens = torch.frombuffer(bytearray(code), dtype=torch.uint8)
        self.rows = tokens[: len(tokens) // seq_len * seq_len].view(-1, seq_len)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index].long()


def main():
    args = arguments()
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    config = GPT2Config(
        n_layer=args.layers, n_embd=args.width, n_head=args.heads, n_positions=args.seq_len, vocab_size=BYTES
    )
    model = GPT2LMHeadModel(config)
    model_engine, _, _, scheduler = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=args.config
    )
    dataset = Code(args.seq_len)
    sampler = DistributedSampler(dataset, seed=args.seed)
    micro_batch = model_engine.train_micro_batch_size_per_gpu()
    loader = DataLoader(dataset, batch_size=micro_batch, sampler=sampler, drop_last=True)
    train(model_engine, loader, args)
    if args.save_dir:
        model_engine.save_checkpoint(args.save_dir)
    if model_engine.global_rank == 0:
        print(f"learning rate {scheduler.get_last_lr()[0]:.2e} after {model_engine.global_steps} optimizer steps")
    torch.distributed.barrier()  # a rank that leaves early takes the others' connections with it
    torch.distributed.destroy_process_group()


def train(model_engine, loader, args):
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        for step, tokens in enumerate(loader):
            tokens = tokens.to(model_engine.device)
            loss = model_engine(input_ids=tokens, labels=tokens).loss
            model_engine.backward(loss)
            model_engine.step()
            place = f"Rank[{model_engine.global_rank}]: Epoch {epoch + 1}, step {step + 1} / {len(loader)}"
            print(f"{place}, loss {loss.item():.4f}", flush=True)
            if model_engine.global_steps == args.max_steps:
                return


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(HERE / "ds_config.json"), help="DeepSpeed's JSON")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max-steps", type=int, help="stop after so many optimizer steps")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--save-dir", help="for a checkpoint at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local_rank", type=int, default=-1, help="the deepspeed launcher passes it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
