"""The HF Trainer: transformers partitions what it builds after the TrainingArguments, if the config has stage 3."""

from evidence import Samples, make_config, note_build, parse
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


def main():
    options = parse()
    arguments = TrainingArguments(
        output_dir=f"{options.log}/saved",
        deepspeed=options.deepspeed_config,
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulate,
        use_cpu=True,
        num_train_epochs=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_config(make_config())
    note_build(options.log, model)
    Trainer(model=model, args=arguments, train_dataset=Samples()).train()


if __name__ == "__main__":
    main()
