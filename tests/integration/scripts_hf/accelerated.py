"""HF Accelerate: a loop of one's own, everything given to `Accelerator.prepare`."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DummyOptim
from transformers import GPT2Config, GPT2LMHeadModel


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", help="for a plugin of our own; otherwise accelerate launch says it")
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save")
    parser.add_argument("--dummy", action="store_true", help="leave the optimizer to the config")
    asked = parser.parse_args()
    plugin = DeepSpeedPlugin(hf_ds_config=asked.deepspeed_config) if asked.deepspeed_config else None
    accelerator = Accelerator(deepspeed_plugin=plugin)
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=2))
    if asked.save:
        model.save_pretrained(asked.save)
    dummy = asked.dummy or "optimizer" in config
    optimizer = (DummyOptim if dummy else torch.optim.AdamW)(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 128, (512, 32), generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(tokens, batch_size=asked.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    while steps < asked.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=batch, labels=batch).loss)
                optimizer.step()
                optimizer.zero_grad()
            steps += accelerator.sync_gradients
            if steps == asked.steps:
                break
    if asked.save:
        accelerator.save_state(asked.save)
    # One write: on CPU ranks accelerate takes each for the main process, and their lines would run into each other.
    accelerator.print(f"trained {steps} steps in batches of {asked.batch_size}\n", end="", flush=True)


if __name__ == "__main__":
    main()
