"""Training scripts that nobody changed, forecast on the simulated device."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from autods import api
from autods.config.rungs import read_rungs, select_rungs
from autods.errors import InputError
from autods.forecast.simulate import ProcessSimulator
from autods.forecast.values import EngineSpec
from autods.types import Knobs
from autods.workload import make_source
from tests.support.composed import compose_config

SCRIPTS = Path(__file__).parent / "scripts"
ARGS = ("--deepspeed_config", "{ds_config}", "--micro-batch", "{micro_batch_size}", "--width", "512")
CPU = {"gpus": 2, "gpu_memory": "4GiB", "device": "cpu", "largest": False}
GPU = {"gpus": 2, "gpu_memory": "4GiB", "host_memory": "64GiB", "largest": False}

# What `with_args.py` trains, as a model.py.
TWIN = """
import torch

class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(3)))

    def forward(self, x, y):
        return torch.nn.functional.mse_loss(self.layers(x), y)

def build_model():
    return Net(512)

def build_batch(micro_batch_size):
    return torch.randn(micro_batch_size, 512), torch.randn(micro_batch_size, 512)
"""

# Asks for all that a tensor without values cannot say.
CURIOUS = """
import sys
import deepspeed
import numpy
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

torch.distributed.init_process_group("nccl")
torch.cuda.set_device(0)
torch.manual_seed(1)
model = torch.nn.Linear(64, 64)
model.load_state_dict(load_file("weights.safetensors"), assign=True)
model.bias = type(model.bias)(model.bias, requires_grad=True)
with torch.inference_mode():
    print(model(torch.randn(2, 64).to("cuda:0").to("cpu")).sum().item())
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=sys.argv[1])
data = TensorDataset(torch.randn(64, 64), torch.randn(64, 64))
losses = []
while True:
    for x, y in DataLoader(data, batch_size=int(sys.argv[2]), shuffle=True, num_workers=2, pin_memory=True):
        loss = ((engine(x.to(engine.device)) - y.to(engine.device)) ** 2).mean()
        if loss > 1e9 or not torch.isfinite(loss):
            raise SystemExit("it diverged")
        engine.backward(loss)
        engine.step()
        torch.cuda.synchronize()
        losses.append(loss.detach().float().cpu().numpy())
        print(f"{loss:.3f}", float(loss), x.tolist()[0][0], numpy.mean(losses), torch.cuda.memory_summary())
        print(torch.cuda.max_memory_allocated() / 2**20, file=open("log.txt", "a"))
"""

# Chooses its precision by the card, and insists on it.
BY_CARD = """
import sys
import deepspeed
import torch

is_recent = torch.cuda.get_device_capability() >= (8, 0)
assert torch.cuda.is_bf16_supported(including_emulation=False) == is_recent
model = torch.nn.Linear(64, 64)
config = {"fp16": {"enabled": not is_recent}, "bf16": {"enabled": is_recent}, "train_micro_batch_size_per_gpu": 4}
optimizer = torch.optim.AdamW(model.parameters())
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
while True:
    engine.backward(engine(torch.randn(4, 64, device=engine.device, dtype=next(model.parameters()).dtype)).mean())
    engine.step()
"""

LOST = """
import deepspeed
import torch

model = torch.nn.Linear(8, 8)
raise RuntimeError("no data here")
"""


@pytest.fixture
def users(tmp_path):
    """The folder of somebody's scripts; it has to be the same at the end."""
    folder = tmp_path / "project"
    shutil.copytree(SCRIPTS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in (("by_card", BY_CARD), ("curious", CURIOUS), ("lost", LOST), ("twin", TWIN)):
        (folder / f"{name}.py").write_text(text)
    weights = {"weight": numpy.zeros((64, 64), "float32"), "bias": numpy.zeros(64, "float32")}
    save_file(weights, folder / "weights.safetensors")
    before = _digest(folder)
    with contextlib.chdir(folder):
        yield folder
    assert _digest(folder) == before


def _digest(folder):
    names_and_contents = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if "__pycache__" not in file.parts:
            names_and_contents.update(str(file).encode() + b"\0" + (file.read_bytes() if file.is_file() else b""))
    return names_and_contents.hexdigest()


def _ask(name):
    (rung,) = select_rungs((name,), read_rungs(()))
    values = {f"zero_optimization.{key}": 1_000_000 for key in ("reduce_bucket_size", "allgather_bucket_size")}
    knobs = Knobs(micro_batch=8, accumulation=2, checkpointing=False, settings=values)
    config = compose_config(rung, knobs, base={}, world_size=4, own_optimizer=False)
    return EngineSpec(
        rung=name, ds_config=config, world_size=4, ranks_per_node=4, device_bytes=8 << 30, checkpointing=False
    )  # fmt: skip


def test_a_script_is_forecast_like_its_model_py(users):
    script, model = make_source(users / "with_args.py", argv=ARGS), make_source(users / "twin.py")
    with ProcessSimulator(script) as script_simulator, ProcessSimulator(model) as other:
        for rung in ("zero1", "zero3-offload"):
            ours, larger = script_simulator.simulate(_ask(rung), [8, 2048])
            (theirs,) = other.simulate(_ask(rung), [8])
            for phase, tiers in theirs.live_bytes.items():
                assert ours.live_bytes[phase]["device"] == pytest.approx(tiers["device"], rel=0.01)
                assert ours.live_bytes[phase].get("pinned", 0) == tiers.get("pinned", 0)
            assert ours.optimizer_elements == theirs.optimizer_elements
            assert larger.live_bytes["backward"]["device"] > ours.live_bytes["backward"]["device"] + 2040 * 512 * 4


def test_values_that_a_script_reads_are_replaced_and_noted(users):
    argv = ("{ds_config}", "{micro_batch_size}")
    forecast = api.plan("curious.py", script_args=argv, ladder="zero2", **GPU)
    (rung,) = forecast.sites[0].rungs
    assert rung.verdict == "fits"
    assert forecast.facts.parameters == 64 * 64 + 64
    assumptions = " ".join(forecast.assumed)
    assert "curious.py:28, 29: values were not computed: 0 stood for them" in assumptions
    assert "workers were not started" in assumptions
    assert "first two optimizer steps" in assumptions


def test_a_manager_a_mesh_and_generated_texts_are_forecast(users):
    argv = ("{ds_config}", "{micro_batch_size}")  # it refuses a micro batch of 1, with which a survey begins
    forecast = api.plan(
        "generates.py", script_args=argv, ladder="zero2", micro_batch=2, **{**GPU, "gpu_memory": "24GiB"}
    )
    (rung,) = forecast.sites[0].rungs
    assert rung.verdict == "fits"
    assert "generated texts were taken to be as long as they may be (max_new_tokens)" in forecast.assumed


def test_a_batch_that_a_script_fixes_is_forecast_as_it_is(users):
    forecast = api.plan("chooses.py", ladder="zero2", **GPU)
    (rung,) = forecast.sites[0].rungs
    assert (rung.verdict, rung.micro_batch) == ("fits", 3)
    said = " ".join(forecast.assumed)
    assert "micro batch 3, which the script fixes" in said
    assert "a mask as index" in said
    assert "upper bounds" in said


def test_a_script_that_asks_for_bf16_sees_the_plans_card(users):
    old = api.plan("by_card.py", ladder="zero2", on="v100-32gb", gpus=2, largest=False)
    new = api.plan("by_card.py", ladder="zero2", on="h100-80gb", gpus=2, largest=False)
    assert [found.sites[0].site.precision for found in (old, new)] == ["fp16", "bf16"]
    assert [found.sites[0].rungs[0].verdict for found in (old, new)] == ["fits", "fits"]


def test_a_script_s_config_is_used_on_cpu_ranks(users):
    forecast = api.plan("with_loader.py", script_args=("own.json",), ladder="zero2", **CPU)
    (rung,) = forecast.sites[0].rungs
    assert rung.verdict == "fits"
    assert forecast.sites[0].site.global_batch == 16
    assert forecast.facts.config["optimizer"]["params"]["lr"] == 0.01


def test_a_batch_left_on_the_cpu_is_reported_with_its_line(users):
    with pytest.raises(InputError) as caught:
        api.plan("with_loader.py", script_args=("own.json",), ladder="zero2", **GPU)
    assert "with_loader.py:18" in str(caught.value)
    assert "engine.device" in str(caught.value)


def test_a_script_that_cannot_be_simulated_names_its_line(users):
    with pytest.raises(InputError) as caught:
        api.plan("lost.py", ladder="zero2", **GPU)
    assert "lost.py:6: cannot run on the simulated device: RuntimeError: no data here" in str(caught.value)
    assert "autods fit" in str(caught.value)
