"""The HF Trainer, as people use it: all by TrainingArguments. A small GPT-2 with random weights on made-up tokens."""

import inspect
import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments


def check_sources():
    """Read methods of the Trainer as programs do that change them by their source, such as axolotl."""
    step = Trainer._maybe_log_save_evaluate
    assert "tr_loss_scalar" in inspect.getsource(step), inspect.getsource(step)
    for method in (step, Trainer.train, Trainer.evaluate, Trainer._save_checkpoint, TrainingArguments.__post_init__):
        assert "/transformers/" in inspect.getsourcefile(method)
        assert "self" in inspect.getfullargspec(method).args
        assert next(iter(inspect.signature(method).parameters)) == "self"


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        tokens = torch.randint(0, 128, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class LogsItself(Trainer):
    """Logs before the Trainer does, as ms-swift's does: then nothing is left to log."""

    def _maybe_log_save_evaluate(self, tr_loss, *args, **kwargs):
        if self.control.should_log:
            tr_loss -= tr_loss
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)


def main():
    if "AUTODS_SESSION" in os.environ:  # a rank of autods's own
        check_sources()
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=2))
    trainer = LogsItself(model=model, args=arguments, train_dataset=Tokens(), eval_dataset=Tokens())
    trainer.train()
    trainer.save_model()
    state = trainer.state
    # One write: on CPU ranks their lines would run into each other.
    print(f"trained {state.global_step} steps in batches of {state.train_batch_size}\n", end="", flush=True)


if __name__ == "__main__":
    main()
