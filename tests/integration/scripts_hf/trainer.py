"""The HF Trainer, as people use it: all by TrainingArguments. A small GPT-2 with random weights on made-up tokens."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        tokens = torch.randint(0, 128, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def main():
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=2))
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens(), eval_dataset=Tokens())
    trainer.train()
    trainer.save_model()
    state = trainer.state
    # One write: on CPU ranks their lines would run into each other.
    print(f"trained {state.global_step} steps in batches of {state.train_batch_size}\n", end="", flush=True)


if __name__ == "__main__":
    main()
