"""One attempt of a run by a script that uses the Trainer, in ranks that a plain launcher starts.

train_trainer.py KILL_STEP SCRIPT ARGUMENTS…

The job is that of AUTODS_RUN. Rank 1 kills itself when it begins the step after KILL_STEP; 0: never. Each rank writes
the first tokens of each sample into samples.rank<N>.jsonl in the attempt's folder, by optimizer step.
"""

import contextlib
import json
import os
import runpy
import signal
import sys
from dataclasses import replace

import torch
from transformers import Trainer

from autods.rank.job import find_job
from autods.rank.script.engine_config import EngineConfig
from autods.rank.script.inject import install_adapters
from autods.rank.script.policy import Injection
from autods.rank.training_run.run_policy import RunPolicy
from autods.rank.training_run.session import NoObserver, Stopped, describe_end
from autods.types import WorkloadSource


def main():
    kill_step, job, rank = int(sys.argv[1]), find_job(), int(os.environ["RANK"])
    sys.argv = sys.argv[2:]
    source = WorkloadSource(kind="script", path=sys.argv[0], name="train", digest="", script_kind="hf_trainer")
    job = replace(job, source=source)
    order = job.order
    torch.manual_seed(job.seed)
    install_adapters(Injection(job=job, slot=0, policy=RunPolicy(job, NoObserver()), config=EngineConfig(job)))
    train = Trainer.training_step

    def training_step(trainer, model, inputs, *args, **kwargs):
        step = trainer.state.global_step + 1
        if kill_step and rank == 1 and step > kill_step:
            os.kill(os.getpid(), signal.SIGKILL)
        with open(order.attempt_folder / f"samples.rank{rank}.jsonl", "a") as file:
            print(json.dumps([step, inputs["input_ids"][:, :4].tolist()]), file=file)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0  # its masks depend on the division of a batch
        return train(trainer, model, inputs, *args, **kwargs)

    Trainer.training_step = training_step
    with contextlib.suppress(Stopped):
        runpy.run_path(sys.argv[0], run_name="__main__")
    end = describe_end()
    if rank == 0:
        (order.attempt_folder / "end.json").write_text(json.dumps({"ended": end.ended, "step": end.step}))


if __name__ == "__main__":
    main()
