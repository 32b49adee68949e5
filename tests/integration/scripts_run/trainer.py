"""The HF Trainer, unmodified for a run."""

from evidence import Evidence, Samples, make_model, parse
from transformers import Trainer, TrainingArguments


class Noting(Trainer):
    evidence = None

    def training_step(self, model, inputs, *args, **kwargs):
        self.evidence.note(model, inputs["input_ids"])
        return super().training_step(model, inputs, *args, **kwargs)


def main():
    options = parse()
    arguments = TrainingArguments(
        output_dir=f"{options.log}/saved",
        deepspeed=options.deepspeed_config,
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulate,
        use_cpu=True,
        num_train_epochs=2,
        learning_rate=1e-3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Noting(model=make_model(), args=arguments, train_dataset=Samples())
    trainer.evidence = Evidence(options.log)
    trainer.train()


if __name__ == "__main__":
    main()
