"""The model of slow_steps.py as a script of HF Accelerate, with the three lines of a run."""

import torch
from accelerate import Accelerator
from slow_steps import build_dataset, build_model, collate

import autods


def main():
    accelerator, model = Accelerator(), build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    session = autods.session(model)
    for batch in session.batches(build_dataset(None), collate_fn=collate):
        with accelerator.accumulate(model):
            loss = model(**batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        session.step_done(loss)


if __name__ == "__main__":
    main()
