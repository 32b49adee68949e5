"""Lightning's DeepSpeedStrategy: the Trainer owns the loop, the config is a file."""

import argparse
import os

import lightning
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from transformers import GPT2Config, GPT2LMHeadModel


class Small(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=2))

    def training_step(self, batch, index):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    asked = parser.parse_args()
    tokens = torch.randint(0, 128, (512, 32), generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(tokens, batch_size=asked.batch_size)
    trainer = lightning.Trainer(
        strategy=DeepSpeedStrategy(config=asked.deepspeed_config),
        devices=int(os.environ.get("WORLD_SIZE", 1)),
        max_steps=asked.steps,
        accumulate_grad_batches=asked.accumulate,
        precision="bf16-mixed",
    )
    trainer.fit(Small(), loader, loader)
    trainer.save_checkpoint("last.ckpt")


if __name__ == "__main__":
    main()
