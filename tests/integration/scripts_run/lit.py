"""Lightning's Trainer, with a schedule and a validation, unmodified for a run."""

import lightning
import torch
from evidence import Evidence, Samples, make_model, parse
from lightning.pytorch.strategies import DeepSpeedStrategy


class Small(lightning.LightningModule):
    def __init__(self, options):
        super().__init__()
        self.model, self.evidence = make_model(), Evidence(options.log)

    def forward(self, **batch):
        return self.model(**batch)

    def on_train_start(self):
        torch.rand(1)  # a hook that draws, and does so again when a run goes on

    def training_step(self, batch, index):
        self.evidence.note(self.trainer.strategy.deepspeed_engine, batch["input_ids"])
        return self.model(**batch).loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main():
    options = parse()
    trainer = lightning.Trainer(
        strategy=DeepSpeedStrategy(config=options.deepspeed_config),
        accelerator="gpu",
        devices=-1,
        accumulate_grad_batches=options.accumulate,
        default_root_dir=options.log,
        enable_progress_bar=False,
        logger=False,
    )
    loader = torch.utils.data.DataLoader(Samples(), batch_size=options.batch_size, shuffle=True)
    trainer.fit(Small(options), loader, torch.utils.data.DataLoader(Samples(), batch_size=32))


if __name__ == "__main__":
    main()
