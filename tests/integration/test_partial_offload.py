"""ZeRO-3 with a part of the optimizer on the device: a fit of two CPU ranks, and one process that resumes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import autods
from autods.rank.ops import ops_folder
from autods.types import Fit
from tests.support.fits import near_forecasts
from tests.support.launchers import cpu_env

# Trains five layers under a linear warm-up, saves a checkpoint after six steps, and prints ten losses, the last four
# of an engine that resumed, and how many moments the checkpoint has. Its argument is the ratio.
_TRAINING = """
import json, sys, tempfile
import deepspeed, torch
from autods.rank.partial_offload import mend_partial_offload

mend_partial_offload()
config = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 50, "warmup_type": "linear"},
    },
    "zero_optimization": {
        "stage": 3, "sub_group_size": 5000, "offload_optimizer": {"device": "cpu", "ratio": float(sys.argv[1])},
    },
}

def make_engine():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(5)))
    matrices, vectors = ([each for each in model.parameters() if each.dim() == count] for count in (2, 1))
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]

def train(engine, steps):
    losses = []
    for step in steps:
        torch.manual_seed(step)
        samples = torch.randn(4, 64).bfloat16()
        loss = ((engine(samples) - samples.roll(1, 1)) ** 2).float().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses

engine = make_engine()
losses = train(engine, range(6))
with tempfile.TemporaryDirectory() as folder:
    engine.save_checkpoint(folder, tag="six")
    losses += train(engine, range(6, 10))
    resumed = make_engine()
    resumed.load_checkpoint(folder, tag="six")
states = resumed.optimizer.optimizer.state.values()
print(json.dumps({
    "losses": losses, "resumed": train(resumed, range(6, 10)), "moments": sum("exp_avg" in each for each in states),
    "on_device": sum(torch.is_tensor(each["step"]) for each in states), "sub_groups": len(states),
}))
"""


def test_both_parts_follow_a_schedule_and_resume(tmp_path: Path) -> None:
    def train(ratio: float) -> dict[str, Any]:
        rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        variables = {**cpu_env(), **rank, "TORCH_EXTENSIONS_DIR": str(ops_folder())}
        command = [sys.executable, "-W", "ignore", "-c", _TRAINING, str(ratio)]
        done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    whole, part = train(1.0), train(0.5)
    assert (whole["on_device"], part["on_device"]) == (0, 2)
    assert part["moments"] == part["sub_groups"] == whole["sub_groups"] == 4
    assert part["losses"] == pytest.approx(whole["losses"], rel=1e-3)
    assert part["resumed"] == pytest.approx(part["losses"][6:], rel=1e-5)


def test_a_fit_finds_and_certifies_a_share_of_the_optimizer(ray: object, tmp_path: Path) -> None:
    architecture = {
        "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 256,
        "num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 64,
    }  # fmt: skip
    model = tmp_path / "config.json"
    model.write_text(json.dumps(architecture))
    asked: dict[str, Any] = {
        "gpus": 2, "device": "cpu", "gpu_memory": "1GiB", "seq_len": 32, "ladder": "zero3-partial-offload",
    }  # fmt: skip
    report = autods.find_best_config(model, config="quick", global_batch=4, out=tmp_path / "out", **asked)
    assert report.rung == "zero3-partial-offload-20"
    assert report.certificate is not None
    assert report.certificate.passed
    assert report.ds_config is not None
    assert report.ds_config["zero_optimization"]["offload_optimizer"]["ratio"] == 0.2
    (rung,) = (each for each in report.forecast if each.rung == report.rung)
    first = next(record.outcome for record in report.trials if isinstance(record.outcome, Fit))
    assert [first.device_peak_bytes] == near_forecasts(rung.memory["device"].peak_bytes)
