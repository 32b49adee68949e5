"""Faulty scripts: each is a good one with one change, and the message that it must give."""

from __future__ import annotations

from functools import partial

from tests.support.faults import Fault

GOOD = """\
import os
import sys
import deepspeed
import torch
from torch.utils.data import DataLoader, TensorDataset
# HERE
size = int(sys.argv[1])
model = torch.nn.Linear(8, 8)
data = TensorDataset(torch.randn(512, 8), torch.randn(512, 8))
loader = DataLoader(data, batch_size=size)
config = {"train_micro_batch_size_per_gpu": size, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for epoch in range(100):
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
"""


Bad = partial(Fault, good=GOOD)

# Found before any trial.
IN_THE_SURVEY = {
    "it never calls the engine": Bad(
        old="engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)",
        new="deepspeed.initialize\nengine = model; raise SystemExit",
        line=None,
        message="it ended and never called deepspeed.initialize",
    ),
    "it exits at once": Bad(old="# HERE", new="sys.exit(0)", line=None, message="never called deepspeed.initialize"),
    "it leaves with an exit code": Bad(old="# HERE", new="sys.exit(3)", line=6, message="it left with exit code 3"),
    "it needs input": Bad(old="# HERE", new="input('which? ')", line=6, message="it waits for input"),
    "it moves to CUDA": Bad(old="Linear(8, 8)", new="Linear(8, 8).cuda()", line=8, message="needs CUDA"),
    "it asks which CUDA device it has": Bad(
        old="# HERE", new="torch.cuda.set_device(0); torch.cuda.current_device()", line=6, message="needs CUDA"
    ),
    "it starts CUDA while it is imported": Bad(
        old="# HERE", new="torch.zeros(1, device='cuda')", line=6, message="needs CUDA"
    ),
    "a package is missing": Bad(
        old="# HERE", new="import nowhere_to_be_found", line=6, message="it needs nowhere_to_be_found, which"
    ),
    "a command line that its parser refuses": Bad(
        old="# HERE",
        new="import argparse; argparse.ArgumentParser().parse_args()",
        line=6,
        message="its command line is refused: unrecognized arguments",
    ),
    "no config": Bad(old=", config=config", new="", line=12, message="it gives deepspeed.initialize no config"),
    "nothing to train with": Bad(
        old="model_parameters=model.parameters(), config=config",
        new="config={'train_micro_batch_size_per_gpu': size}",
        line=12,
        message="it trains an engine that has no optimizer",
    ),
    "ranks of its own": Bad(
        old="# HERE", new="torch.multiprocessing.spawn(print, nprocs=2)", line=6, message="starts ranks of its own"
    ),
    "it raises": Bad(old="# HERE", new="{}['key']", line=6, message="KeyError: 'key'"),
}

# Found in the first trial.
IN_A_TRIAL = {
    "it exits before a step": Bad(
        old="    for x, y in loader:",
        new="    sys.exit(0)\n    for x, y in loader:",
        line=None,
        message="it ended after 0 optimizer steps",
    ),
    "too little data": Bad(old="range(100)", new="range(0)", line=None, message="it ended after 0 optimizer steps"),
    "a batch size of its own": Bad(
        old="batch_size=size",
        new="batch_size=8",
        line=10,
        message="its batches hold 8 samples, where the config says 1",
    ),
    "it trains in a forked child": Bad(
        old="for epoch",
        new="if os.fork():\n    os.wait(); sys.exit(0)\nfor epoch",
        line=None,
        message="it trains in a process that it forked",
    ),
    "two engines": Bad(
        old="for epoch",
        new="deepspeed.initialize(model=torch.nn.Linear(8, 8), config=config)\nfor epoch",
        line=13,
        message="calls deepspeed.initialize a second time",
    ),
    "it swallows what goes wrong": Bad(
        old="        loss = torch.nn.functional.mse_loss(engine(x), y)",
        new="        try: loss = torch.nn.functional.mse_loss(engine(x[:, :3]), y)\n        except: continue",
        line=15,
        message="mat1 and mat2 shapes cannot be multiplied",
    ),
    "a loss that is no number": Bad(
        old="(engine(x), y)", new="(engine(x), y * float('nan'))", line=None, message="the loss is nan at step 1"
    ),
}

# Odd scripts that can be tuned.
FINE = {
    "as it is": ("# HERE", ""),
    "it catches everything": (
        "        loss = torch.nn.functional.mse_loss(engine(x), y)\n        engine.backward(loss)\n"
        "        engine.step()\n",
        "        try:\n            engine.backward(torch.nn.functional.mse_loss(engine(x), y))\n"
        "            engine.step()\n"
        "        except:\n            pass\n",
    ),
    "it never ends once it is told to": (
        "        engine.step()\n",
        "        try:\n            engine.step()\n        except BaseException:\n            import time\n"
        "            time.sleep(1000)\n",
    ),
    "it asks a frozen model in an engine of its own": (
        "for epoch in range(100):\n    for x, y in loader:\n",
        "frozen = deepspeed.initialize(model=torch.nn.Linear(8, 8), config={'train_batch_size': 2 * size})[0]\n"
        "for epoch in range(100):\n    for x, y in loader:\n        y = frozen(x).detach()\n",
    ),
    "it forks a helper": ("# HERE", "if not os.fork():\n    import time; time.sleep(1000)"),
    "it leaves with an error on its way out": (
        "        engine.step()\n",
        "        try:\n            engine.step()\n        except BaseException:\n            sys.exit(5)\n",
    ),
    "it insists on its number of ranks": ("# HERE", "assert os.environ['WORLD_SIZE'] == '2', 'two ranks'"),
    "its loader has workers": ("batch_size=size", "batch_size=size, num_workers=2, persistent_workers=True"),
    "it prints gigabytes": ("        engine.step()\n", "        engine.step()\n        print('x' * 2**25)\n"),
}
