"""A model that stage 3 splits while it is built starts from the weights that its architecture or its code asks for."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import autods
from autods.errors import InputError
from autods.types import Fit, Outcome
from tests.support.frozen_model import frozen_model

VOCABULARY = 2048
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 512, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}


def test_the_first_loss_is_that_of_guessing_and_falls(ray: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    report = autods.probe(
        f"hf:{tmp_path}", vary={"rung": ["zero3"]}, gpus=2, device="cpu", gpu_memory="2GiB", config="quick", repeats=1,
        seq_len=32, out=tmp_path / "out", precision="fp32", zero_init=True, forecast=False,
    )  # fmt: skip
    fit = report.trials[0].outcome
    assert isinstance(fit, Fit), fit
    assert fit.losses[0] == pytest.approx(math.log(VOCABULARY), rel=0.05)
    assert fit.losses[-1] < fit.losses[0]


MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((64,), 2.0))
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        self.apply(self.set_weights)
        {last}

    def set_weights(self, module):
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.eye_(module.weight)
            torch.nn.init.constant_(module.bias, 0.25)

    def forward(self, x):
        return self.layers(x * self.scale).square().mean()

def build_model():
    return Net()

def build_batch(micro_batch_size):
    return (torch.ones(micro_batch_size, 64),)
"""


def probe_model(folder: Path, *, zero_init: bool, last: str = "pass") -> Outcome | None:
    (folder / "model.py").write_text(MODEL.format(last=last))
    report = autods.probe(
        folder / "model.py", vary={"rung": ["zero3"]}, gpus=2, device="cpu", gpu_memory="2GiB", config="quick",
        repeats=1, out=folder / f"out-{zero_init}", precision="fp32", zero_init=zero_init, forecast=False,
    )  # fmt: skip
    return report.trials[0].outcome


def test_a_model_py_built_in_parts_trains_as_the_whole_one(ray: object, tmp_path: Path) -> None:
    in_parts, whole = (probe_model(tmp_path, zero_init=zero_init) for zero_init in (True, False))
    assert isinstance(in_parts, Fit), in_parts
    assert isinstance(whole, Fit), whole
    assert in_parts.losses[0] == pytest.approx(9.0)  # (1 * 2 + 4 * 0.25) squared: the weights that the model sets
    shared = min(len(in_parts.losses), len(whole.losses))
    assert in_parts.losses[:shared] == pytest.approx(whole.losses[:shared], rel=1e-5)


def test_a_trial_refuses_a_weight_set_after_it_was_partitioned(ray: object, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the model would start from wrong weights"):
        probe_model(tmp_path, zero_init=True, last="torch.nn.init.zeros_(self.layers[0].weight)")


FROZEN = frozen_model(width=1408, layers=28)


def autods_on_two_ranks(folder: Path, command: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "model.py").write_text(FROZEN)  # 212 MiB, of which only the last layer trains: the build decides
    asked = ("--gpus", "2", "--device", "cpu", "--gpu-memory", "240MiB", "--ladder", "zero3", "--precision", "fp32")
    search = ("--config", "quick", "--max-trials", "1", "--global-batch", "2", "--out", str(folder / command))
    program = (sys.executable, "-m", "autods", command, str(folder / "model.py"), *asked, *search, *options)
    return subprocess.run(program, capture_output=True, text=True, timeout=500, check=False)


def test_a_fit_proposes_to_build_in_parts_and_a_run_does(ray: object, tmp_path: Path) -> None:
    fit = autods_on_two_ranks(tmp_path, "fit")
    assert fit.returncode == 1, fit.stderr
    assert "nothing fits without --zero-init; with it zero3 fits" in fit.stdout
    assert "each of the 2 ranks of a node builds the whole model first" in " ".join(fit.stdout.split())
    (line,) = (line for line in fit.stdout.splitlines() if line.startswith("with --zero-init: "))
    assert line.endswith(f"--out {tmp_path / 'fit'} --zero-init --fresh")

    for steps in (3, 5):
        run = autods_on_two_ranks(tmp_path, "run", "--zero-init", "--no-forecast", "--steps", str(steps))
        assert run.returncode == 0, run.stderr
        report = json.loads((tmp_path / "run" / "run.json").read_text())
        assert (report["status"], report["step"], report["rescues"]) == ("done", steps, 0)
    steps_of_second = (tmp_path / "run" / "attempts" / "2" / "steps.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in steps_of_second] == [4, 5]
    certificate = json.loads((tmp_path / "run" / "fit" / "report.json").read_text())["certificate"]
    assert certificate["failures"] == []


BUILDS = """
import json, torch, deepspeed
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from autods.rank.zero_init import partition_at_build
from autods.workload import Workload, WorkloadError

class Net(nn.Module):
    def __init__(self, build):
        super().__init__()
        self.linear = nn.Linear(4, 8)
        build(self, self.linear.weight)

def gather(net, weight):
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        nn.init.ones_(weight)

def encode(net, weight):
    net.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2)

def set_item(net, weight):
    with torch.no_grad():
        weight[0] = 0

def set_data(net, weight):
    weight.data = torch.ones(8, 4)

def draw_matrices(net, weight):
    [nn.init.xavier_uniform_(weight) for weight in net.parameters() if weight.dim() > 1]

def check_shape(net, weight):
    assert (*weight.shape, weight.dim(), weight.numel(), weight.size(1)) == (8, 4, 2, 32, 4)

def own_context(net, weight):
    with deepspeed.zero.Init():
        net.more = nn.Linear(4, 4)

GPT = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8)
CASES = {
    "apply": lambda net, weight: net.apply(lambda m: nn.init.ones_(m.weight) if isinstance(m, nn.Linear) else None),
    "gathered": gather,
    "shape": check_shape,
    "cast": lambda net, weight: net.to("cpu").float().requires_grad_(True),
    "tied": lambda net, weight: setattr(nn.Linear(4, 8), "weight", weight),
    "own zero.Init": own_context,
    "from_config": lambda net, weight: setattr(net, "model", AutoModelForCausalLM.from_config(GPT)),
    "transformers": lambda net, weight: setattr(net, "model", GPT2LMHeadModel(GPT)),
    "init": lambda net, weight: nn.init.normal_(weight),
    "only matrices": draw_matrices,
    "data": lambda net, weight: weight.data.normal_(),
    "set data": set_data,
    "item": set_item,
    "deepcopy": encode,
    "norm": lambda net, weight: weight.norm(),
}
config, ends = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}, {}
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as on CPU ranks: a build of half a minute
deepspeed.init_distributed("gloo")
for name, build in CASES.items():
    def build_model():
        assert is_deepspeed_zero3_enabled()
        return Net(build)
    try:
        model = partition_at_build(Workload(build_model=build_model, build_batch=None), config).build_model()
        assert all(hasattr(weight, "ds_id") for weight in model.parameters())
        ends[name] = "built"
    except WorkloadError as error:
        ends[name] = "refused" if "wrong weights" in str(error) else str(error)
    assert not is_deepspeed_zero3_enabled()
print(json.dumps(ends))
"""


def test_build_model_uses_no_weight_that_is_partitioned(tmp_path: Path) -> None:
    (tmp_path / "builds.py").write_text(BUILDS)
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "builds.py")], env={**os.environ, **rank, "MASTER_PORT": str(port)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout.splitlines()[-1])
    assert [name for name, end in ends.items() if end == "built"] == [
        "apply", "gathered", "shape", "cast", "tied", "own zero.Init", "from_config",
    ]  # fmt: skip
    assert [name for name, end in ends.items() if end == "refused"] == [
        "transformers", "init", "only matrices", "data", "set data", "item", "deepcopy", "norm",
    ]  # fmt: skip
