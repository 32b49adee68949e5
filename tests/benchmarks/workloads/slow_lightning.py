"""The model of slow_steps.py as a script of Lightning's Trainer, which needs no change for a run."""

import argparse

import lightning
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from slow_steps import build_dataset, build_model, collate


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = build_model()

    def training_step(self, batch, index):
        return self.model(**batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main():
    parser = argparse.ArgumentParser()
    for name, kind in (("--deepspeed_config", str), ("--batch_size", int), ("--accumulate", int)):
        parser.add_argument(name, type=kind)
    options = parser.parse_args()
    trainer = lightning.Trainer(
        strategy=DeepSpeedStrategy(config=options.deepspeed_config),
        accelerator="gpu",
        devices=-1,
        accumulate_grad_batches=options.accumulate,
        max_epochs=-1,
        enable_progress_bar=False,
        logger=False,
        enable_checkpointing=False,
    )
    loader = torch.utils.data.DataLoader(build_dataset(None), batch_size=options.batch_size, collate_fn=collate)
    trainer.fit(Module(), loader)


if __name__ == "__main__":
    main()
