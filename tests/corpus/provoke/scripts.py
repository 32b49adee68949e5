"""Small training scripts as people write them; a provocation fills in what goes wrong."""

from __future__ import annotations

import textwrap

DATA_LIMIT = """
import resource
def limit_memory(mebibytes):
    used = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) << 10
    budget = used + (mebibytes << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (budget, budget))
"""


def _fill(text: str, **parts: str) -> str:
    """Puts every part at its `# <part>` line, at that line's depth."""
    lines = []
    for line in textwrap.dedent(text).lstrip("\n").splitlines():
        name = line.strip().removeprefix("# ")
        if line.strip().startswith("# ") and name in parts:
            depth = line[: len(line) - len(line.lstrip())]
            lines += textwrap.indent(textwrap.dedent(parts[name]).strip(), depth).splitlines()
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def ddp(setup: str = "", step: str = "", end: str = "", *, steps: int = 12, width: int = 64, timeout: int = 60) -> str:
    """torch's DistributedDataParallel on gloo."""
    return _fill(
        f"""
        import os
        import sys
        import time
        from datetime import timedelta

        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel as DDP


        class Net(nn.Module):
            def __init__(self, width={width}):
                super().__init__()
                self.body = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                self.head = nn.Linear(width, 10)

            def forward(self, x):
                return self.head(self.body(x))


        def main():
            rank = int(os.environ["RANK"])
            # setup
            dist.init_process_group("gloo", timeout=timedelta(seconds={timeout}))
            world = dist.get_world_size()
            torch.manual_seed(rank)
            model = DDP(Net())
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
            if rank == 0:
                print(f"training on {{world}} ranks, {{sum(p.numel() for p in model.parameters()):,}} parameters")
            for step in range({steps}):
                x, y = torch.randn(16, {width}), torch.randint(0, 10, (16,))
                # step
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if rank == 0 and step % 2 == 0:
                    print(f"step {{step}} | loss {{loss.item():.4f}} | lr 3.0e-04")
            # end
            dist.destroy_process_group()


        if __name__ == "__main__":
            main()
        """,
        setup=setup or "pass",
        step=step or "pass",
        end=end or "pass",
    )


def engine(
    setup: str = "", step: str = "", end: str = "", *, steps: int = 12, width: int = 64, config: str = "ds_config.json"
) -> str:
    """A DeepSpeed engine and its loop."""
    return _fill(
        f"""
        import argparse
        import os
        import sys
        import time

        import deepspeed
        import torch
        from torch import nn


        class Block(nn.Module):
            def __init__(self, width):
                super().__init__()
                self.norm = nn.LayerNorm(width)
                self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

            def forward(self, x):
                return x + self.mlp(self.norm(x))


        class Model(nn.Module):
            def __init__(self, vocab=512, width={width}, layers=4):
                super().__init__()
                self.embed = nn.Embedding(vocab, width)
                self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
                self.head = nn.Linear(width, vocab)

            def forward(self, tokens, labels):
                logits = self.head(self.blocks(self.embed(tokens)))
                return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


        def main():
            parser = argparse.ArgumentParser()
            parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
            parser = deepspeed.add_config_arguments(parser)
            args = parser.parse_args()
            rank = int(os.environ.get("RANK", 0))
            # setup
            deepspeed.init_distributed("gloo")
            model = Model()
            engine, optimizer, _, _ = deepspeed.initialize(
                args=args, model=model, model_parameters=model.parameters()
            )
            for step in range({steps}):
                tokens = torch.randint(0, 512, (engine.train_micro_batch_size_per_gpu(), 32))
                # step
                loss = engine(tokens, tokens)
                engine.backward(loss)
                engine.step()
                if rank == 0:
                    print(f"step={{step}} loss={{loss.item():.4f}}")
            # end


        if __name__ == "__main__":
            main()
        """,
        setup=setup or "pass",
        step=step or "pass",
        end=end or "pass",
    )


def zero(stage: int, **more: object) -> dict[str, object]:
    """A DeepSpeed configuration that runs on CPU ranks."""
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 5,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
    }
    zero_more = more.pop("zero", {})
    assert isinstance(zero_more, dict)
    config["zero_optimization"] = {"stage": stage, **zero_more}
    return config | more


def plain(body: str, imports: str = "") -> str:
    """One process with a model and a loader; `body` trains."""
    return _fill(
        """
        import os
        import sys

        import torch
        from torch import nn
        from torch.utils.data import DataLoader, Dataset
        # imports


        def main():
            # body


        if __name__ == "__main__":
            main()
        """,
        body=body,
        imports=imports or "import time",
    )


def trainer(arguments: str = "", dataset: str = "", end: str = "", *, steps: int = 30, setup: str = "") -> str:
    """Hugging Face's Trainer with a tiny random GPT-2."""
    return _fill(
        f"""
        import os
        import sys

        import torch
        from torch.utils.data import Dataset
        from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


        class Packed(Dataset):
            def __init__(self, rows=256, length=32):
                self.tokens = torch.randint(0, 256, (rows, length))

            def __len__(self):
                return len(self.tokens)

            def __getitem__(self, index):
                # dataset
                return {{"input_ids": self.tokens[index], "labels": self.tokens[index]}}


        def main():
            # setup
            arguments = TrainingArguments(
                output_dir="out",
                max_steps={steps},
                per_device_train_batch_size=4,
                logging_steps=10,
                save_strategy="no",
                report_to=[],
                # arguments
            )
            model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=256, n_positions=64))
            trainer = Trainer(model=model, args=arguments, train_dataset=Packed())
            trainer.train()
            # end


        if __name__ == "__main__":
            main()
        """,
        arguments=arguments,
        dataset=dataset or "pass",
        end=end or "pass",
        setup=setup or "pass",
    )
