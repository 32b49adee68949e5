"""T5 learns to translate English into Romanian with the HF Trainer: random weights, bytes as tokens, no downloads.

cd examples/t5_translation
torchrun --nproc_per_node 2 run_translation.py --deepspeed ds_zero2.json --config_name ../geometries/t5-small \
--do_train --do_eval --bf16 --per_device_train_batch_size 4 --learning_rate 1e-3 --output_dir out

On CPU ranks add --use_cpu.
"""

import dataclasses
import pathlib

import deepspeed
import torch
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

PAD, END, SPECIAL = 0, 1, 3  # as in ByT5: a byte's token is the byte + 3
HERE = pathlib.Path(__file__).resolve().parent


@dataclasses.dataclass
class ModelArguments:
    config_name: str = dataclasses.field(
        default=str(HERE.parent / "geometries" / "t5-tiny"), metadata={"help": "a folder with a config.json"}
    )


@dataclasses.dataclass
class DataArguments:
    train_file: str = dataclasses.field(default=str(HERE / "pairs.tsv"), metadata={"help": "source, tab, target"})
    source_prefix: str = dataclasses.field(default="translate English to Romanian: ")
    max_source_length: int = 128
    max_target_length: int = 128
    max_train_samples: int | None = None
    max_eval_samples: int = 50
    pad_to_max_length: bool = dataclasses.field(default=False, metadata={"help": "else to the longest of the batch"})


def main():
    parser = HfArgumentParser((ModelArguments, DataArguments, Seq2SeqTrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    if training_args.use_cpu:
        deepspeed.init_distributed()  # on GPUs the Trainer did: ZeRO-3 has to know of all ranks before there is a model

    # After the TrainingArguments: under ZeRO-3 they make Transformers partition the weights as they are made.
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.from_pretrained(model_args.config_name))
    if training_args.gradient_checkpointing:
        model.config.use_cache = False

    pairs = [line.split("\t") for line in pathlib.Path(data_args.train_file).read_text("utf-8").splitlines()]
    rows = [row(source, target, data_args) for source, target in pairs]
    training, evaluation = rows[data_args.max_eval_samples :], rows[: data_args.max_eval_samples]
    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=training[: data_args.max_train_samples],
        eval_dataset=evaluation,
        data_collator=Collator(data_args),
    )
    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


def row(source, target, data_args):
    return {
        "input_ids": tokens(data_args.source_prefix + source, data_args.max_source_length),
        "labels": tokens(target, data_args.max_target_length),
    }


def tokens(text, longest):
    return [*(byte + SPECIAL for byte in text.encode()[: longest - 1]), END]


@dataclasses.dataclass
class Collator:
    data_args: DataArguments

    def __call__(self, rows):
        inputs = self.padded([row["input_ids"] for row in rows], PAD, self.data_args.max_source_length)
        labels = self.padded([row["labels"] for row in rows], -100, self.data_args.max_target_length)
        return {"input_ids": inputs, "attention_mask": (inputs != PAD).long(), "labels": labels}

    def padded(self, rows, filler, longest):
        length = longest if self.data_args.pad_to_max_length else max(len(row) for row in rows)
        return torch.tensor([row + [filler] * (length - len(row)) for row in rows])


if __name__ == "__main__":
    main()
