"""Attempts of a training run in the same ranks, one after the other, by the three lines of a user's script.

train_attempts.py JOB…

Each rank writes its samples into samples.rank<N>.jsonl in the attempt's folder, by optimizer step.
"""

import json
import os
import sys
import time
from dataclasses import asdict

import deepspeed
import torch
from torch import nn

import autods
from autods.rank.job import read_job
from autods.rank.training_run.session import Stopped, describe_end


class Net(nn.Module):
    """No size divides by the number of ranks; one layer is frozen, and a buffer counts the forwards."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.out = nn.Linear(7, 13), nn.LayerNorm(13), nn.Linear(13, 3)
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.register_buffer("forwards", torch.zeros(1))

    def forward(self, inputs, labels):
        self.forwards += 1
        hidden = torch.tanh(self.frozen(self.norm(self.embed(inputs))))
        return nn.functional.mse_loss(self.out(hidden), labels)


def sample(number):
    generator = torch.Generator().manual_seed(number)
    return {"inputs": torch.randn(7, generator=generator), "labels": torch.randn(3, generator=generator)}


def train(path):
    os.environ["AUTODS_RUN"] = path
    job = read_job(path)
    order = job.order
    torch.manual_seed(order.attempt)  # what is not restored differs
    model = Net()
    weights, biases = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (weights if parameter.dim() > 1 else biases).append(parameter)
    if order.restore is None:
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=dict(job.ds_config))
    session = autods.session(engine)
    session.state["attempts"] = [*session.state.get("attempts", ()), order.attempt]
    try:
        for batch in session.batches([sample(number) for number in range(20)]):
            with open(order.attempt_folder / f"samples.rank{engine.global_rank}.jsonl", "a") as file:
                print(json.dumps([session.step + 1, batch["inputs"].tolist()]), file=file)
            loss = engine(**batch)
            engine.backward(loss)
            engine.step()
            session.step_done(loss)
    except Stopped:
        pass
    end = asdict(describe_end()) | {
        "attempts": session.state["attempts"], "forwards": float(engine.module.forwards)
    }  # fmt: skip
    if engine.global_rank == 0:
        (order.attempt_folder / "end.json").write_text(json.dumps(end))
    engine.destroy()


if __name__ == "__main__":
    deepspeed.init_distributed(dist_backend="gloo")
    for job_path in sys.argv[1:]:
        train(job_path)
    torch.distributed.barrier()
    time.sleep(0.2)  # gloo aborts a rank whose peer leaves while it is still in the barrier
