"""A small byte-level language model cut into pipeline stages (`PipelineModule`), on Python's own language reference.

torchrun --nproc_per_node 2 examples/pipeline/pipeline.py --deepspeed_config examples/pipeline/ds_config.json --stages 2
"""

import argparse
import pydoc_data.topics

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

BYTES = 256


class Embedding(nn.Module):
    def __init__(self, width, seq_len):
        super().__init__()
        self.tokens = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(seq_len, width)

    def forward(self, tokens):
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))


class Block(nn.TransformerEncoderLayer):
    def __init__(self, width):
        super().__init__(width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, hidden):
        length = hidden.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
        return super().forward(hidden, src_mask=mask, is_causal=True)


def next_byte(logits, tokens):
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def main():
    args = arguments()
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    model = PipelineModule(
        layers=[
            LayerSpec(Embedding, args.width, args.seq_len),
            *(LayerSpec(Block, args.width) for _ in range(args.layers)),
            LayerSpec(nn.Linear, args.width, BYTES),
        ],
        num_stages=args.stages,
        loss_fn=next_byte,
        partition_method="parameters",
        activation_checkpoint_interval=1 if args.gradient_checkpointing else 0,
    )
    engine, *_ = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        training_data=text(args.seq_len),
    )
    for step in range(1, args.steps + 1):
        loss = engine.train_batch()  # all micro batches of an optimizer step go through the pipeline
        if engine.global_rank == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    if args.save_dir:
        engine.save_checkpoint(args.save_dir)
    torch.distributed.barrier()  # a rank that leaves early takes the others' connections with it
    torch.distributed.destroy_process_group()


def text(seq_len):
    """Rows of bytes; each is its own label, the loss looks one byte ahead."""
    topics = "\n".join(pydoc_data.topics.topics.values()).encode()
    tokens = torch.tensor(list(topics[: len(topics) // seq_len * seq_len])).view(-1, seq_len)
    return TensorDataset(tokens, tokens)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2, help="ranks that share one copy of the model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--save-dir", help="for a checkpoint at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local_rank", type=int, default=-1, help="the deepspeed launcher passes it")
    return deepspeed.add_config_arguments(parser).parse_args()


if __name__ == "__main__":
    main()
