"""A loop of its own: `config=` is a dict, its own optimizer and schedule, evaluation and files between the steps."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import time

import torch
from deepspeed import initialize
from helper import build
from torch.utils.data import DataLoader

BATCH, ACCUMULATION, PAUSE_S = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
BESIDE_PYTHON = "beside-python" in sys.argv  # also write by C code and by a program
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": ACCUMULATION,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "round_robin_gradients": True},
    "wandb": {"enabled": True, "project": "mine"},
}


def main():
    model, data = build(json.load(open("numbers.json"))["width"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    engine, _, _, _ = initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=CONFIG, dist_init_required=True
    )
    os.makedirs("results", exist_ok=True)
    best, done = 1e9, 0
    with open("results/log.txt", "w") as log:
        for _ in range(1000):
            for x, y in DataLoader(data, batch_size=BATCH):
                loss = torch.nn.functional.mse_loss(engine(x), y)
                engine.backward(loss)
                engine.step()
                done += 1
                log.write(f"{loss.item()}\n")
                if done % ACCUMULATION == 0:
                    best = min(best, evaluated(engine, data))
                    torch.save(engine.module.state_dict(), "results/best.pt")
                    copy = f"results/best{os.environ['RANK']}.pt"
                    shutil.copyfile("results/best.pt", copy)
                    assert torch.load(copy).keys() == engine.module.state_dict().keys()
                    if BESIDE_PYTHON:
                        write_beside_python()
                    engine.save_checkpoint("results", tag="last")
                    with open("results/last/step.txt", "w") as note:
                        note.write(str(done))


def write_beside_python():
    libc = ctypes.CDLL(None)
    assert libc.creat(b"numbers.json", 0o644) == libc.unlink(b"own.json") == libc.truncate(b"helper.py", 0) == -1
    assert subprocess.run(["sh", "-c", "echo > numbers.json; rm own.json; touch new"]).returncode
    subprocess.run(["sh", "-c", 'cp numbers.json "$TMPDIR/copy$RANK"'], check=True)


def evaluated(engine, data):
    engine.eval()
    time.sleep(PAUSE_S)
    with torch.no_grad():
        x, y = data[:4]
        loss = torch.nn.functional.mse_loss(engine(x), y)
    engine.train()
    return loss.item()


if __name__ == "__main__":
    main()
