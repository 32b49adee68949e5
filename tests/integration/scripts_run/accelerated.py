"""HF Accelerate with the three lines of a run, and a schedule that accelerate steps."""

import torch
from accelerate import Accelerator
from evidence import Evidence, Samples, make_model, parse

import autods


def main():
    options = parse()
    accelerator = Accelerator()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    session, evidence = autods.session(model), Evidence(options.log)
    for batch in session.batches(Samples()):
        evidence.note(accelerator.deepspeed_engine_wrapped.engine, batch["input_ids"])
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        session.step_done(loss)
    accelerator.end_training()


if __name__ == "__main__":
    main()
