"""LoRA on a Hugging Face config: what a plan says of it, and what trains on real ranks."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import autods
from autods.config.rungs import read_rungs, select_rungs
from autods.forecast.simulate import ProcessSimulator
from autods.forecast.values import EngineSpec
from autods.types import Fit, Knobs
from autods.workload import WorkloadError, load, make_source
from tests.support.composed import compose_config
from tests.support.run_jobs import read_steps

VOCABULARY = 2048
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512,
    "num_attention_heads": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 128,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 99, "n_positions": 48},
    "t5": {
        "model_type": "t5", "is_encoder_decoder": True, "d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2,
        "d_kv": 16, "vocab_size": 99,
    },
    "llama": LLAMA,
}  # fmt: skip
four_bits = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is missing")
LORA = ("4", pytest.param("4bit:4", marks=four_bits))
RANKS = ("--gpus", "2", "--device", "cpu", "--gpu-memory", "1GiB")


def write(folder: Path, config: dict[str, Any] = LLAMA) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", SMALL)
def test_the_adapters_alone_get_gradients(name: str, tmp_path: Path) -> None:
    workload = load(make_source(write(tmp_path, SMALL[name]), seq_len=8, lora=4))
    model, batch = workload.build(), workload.build_batch(2)
    assert isinstance(batch, dict)
    model.gradient_checkpointing_enable()
    model.train()
    model(**batch).loss.backward()
    trained = {name for name, weights in model.named_parameters() if weights.grad is not None}
    assert trained
    assert trained == {name for name, _ in model.named_parameters() if "lora_" in name}


def test_a_layer_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    path = write(tmp_path)
    with pytest.raises(WorkloadError) as caught:
        load(make_source(path, lora="4,q_porj")).build()
    problem, hint = str(caught.value).splitlines()
    assert problem == f"{path}: --lora: the model has no linear layer 'q_porj'"
    assert "q_proj, k_proj, v_proj, o_proj" in hint


def test_a_plan_counts_states_of_the_adapters_alone(tmp_path: Path) -> None:
    options: dict[str, Any] = {"gpus": 2, "gpu_memory": "16GiB", "host_memory": "64GiB", "seq_len": 8}
    whole, lora = (
        autods.plan(write(tmp_path), ladder="zero2", largest=False, lora=value, **options) for value in (None, 8)
    )
    facts, (zero2,) = lora.facts, lora.sites[0].rungs
    assert facts.trained_parameters == facts.parameters - whole.facts.parameters
    assert whole.facts.trained_parameters is None
    states = zero2.breakdown["optimizer"] / (facts.trained_parameters / 2)  # bytes of a rank's half
    assert 12 <= states <= 18  # Adam's, and gradients in fp32
    assert zero2.breakdown["parameters"] == pytest.approx(2 * facts.parameters, rel=0.1)
    assert zero2.breakdown.get("gradients", 0) <= 2.1 * facts.trained_parameters
    assert any("LoRA of rank 8 on all-linear" in sentence for sentence in lora.assumed)


def test_stage_3_alone_divides_frozen_weights(tmp_path: Path) -> None:
    """Of the weights, in fp32, a rank holds all in a step of ZeRO-2, and half in one of ZeRO-3."""
    held = {}
    with ProcessSimulator(make_source(write(tmp_path), seq_len=8, lora=1)) as simulator:
        parameters = simulator.facts("cuda").parameters
        for rung in select_rungs(("zero2", "zero3"), read_rungs(())):
            values: dict[str, Any] = {
                f"zero_optimization.{name}_bucket_size": 10_000 for name in ("reduce", "allgather")
            }
            values |= {
                f"zero_optimization.stage3_{name}": 1000 for name in ("max_live_parameters", "max_reuse_distance")
            }
            values["zero_optimization.stage3_param_persistence_threshold"] = 1000
            config = compose_config(rung, Knobs(settings=values), base={}, world_size=2, own_optimizer=False)
            spec = EngineSpec(rung=rung.name, ds_config=config, world_size=2, ranks_per_node=2, device_bytes=8 << 30)
            (simulation,) = simulator.simulate(spec, [1])
            held[rung.name] = simulation.live_bytes["step"]["device"]
    assert held["zero2"] > 4 * parameters
    assert held["zero2"] - held["zero3"] == pytest.approx(2 * parameters, rel=0.1)


@four_bits
def test_adapters_train_beside_4_bit_weights_of_stage_3(ray: object, tmp_path: Path) -> None:
    report = autods.probe(
        write(tmp_path), vary={"rung": ["zero3"]}, gpus=2, device="cpu", gpu_memory="2GiB", config="quick", repeats=1,
        seq_len=32, out=tmp_path / "out", precision="bf16", lora="4bit:4", forecast=False,
    )  # fmt: skip
    fit = report.trials[0].outcome
    assert isinstance(fit, Fit), fit
    assert fit.losses[0] == pytest.approx(math.log(VOCABULARY), rel=0.05)


def test_adapters_train_beside_weights_built_in_parts(ray: object, tmp_path: Path) -> None:
    report = autods.probe(
        write(tmp_path), vary={"rung": ["zero3"]}, gpus=2, device="cpu", gpu_memory="2GiB", config="quick", repeats=1,
        seq_len=32, out=tmp_path / "out", precision="bf16", zero_init=True, lora="4,q_proj,v_proj", forecast=False,
    )  # fmt: skip
    fit = report.trials[0].outcome
    assert isinstance(fit, Fit), fit
    assert fit.losses[0] == pytest.approx(math.log(VOCABULARY), rel=0.05)


@four_bits
def test_the_forecast_of_4_bit_weights_is_their_size(tmp_path: Path) -> None:
    """And a step's matmuls take as long as those of whole weights, beside which each layer is made whole."""
    path = write(tmp_path)
    packed = load(make_source(path, seq_len=8, lora="4bit:8")).build()
    size = sum(weights.nbytes for name, weights in packed.named_parameters() if "lora" not in name) / 2
    size += sum(weights.nbytes for name, weights in packed.named_parameters() if weights.dtype == torch.uint8) / 2
    held = {}
    for state in (weights.quant_state for weights in packed.parameters() if weights.dtype == torch.uint8):
        tensors = (state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
        held |= {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    size += sum(held.values())
    options: dict[str, Any] = {"gpus": 1, "on": "rtx4090-24gb", "ladder": "ddp", "largest": False, "seq_len": 8}
    plans = [autods.plan(path, lora=lora, **options) for lora in (8, "4bit:8")]
    whole, four = (plan.sites[0].rungs[0] for plan in plans)
    adapters = 2 * plans[1].facts.trained_parameters
    assert four.breakdown["parameters"] - adapters == pytest.approx(size, rel=0.02)
    assert plans[0].facts.parameters == plans[1].facts.parameters
    spent = [rung.speed.step.spent for rung in (whole, four) if rung.speed is not None]
    assert spent[1]["compute"] == pytest.approx(spent[0]["compute"], rel=0.02)
    assert spent[1]["memory"] > spent[0]["memory"]


@pytest.mark.parametrize("lora", LORA)
def test_a_run_of_adapters_goes_on_and_leaves_their_weights(lora: str, tmp_path: Path) -> None:
    """The fit passes its certificate, and the last checkpoint has what peft saves as an adapter."""
    config, out = write(tmp_path), tmp_path / "out"
    options = (
        "--ladder",
        "zero2",
        "--config",
        "quick",
        "--seq-len",
        "16",
        "--precision",
        "fp32",
        "--lora",
        lora,
        "--max-trials",
        "1",
        "--no-forecast",
    )
    for steps in (3, 5):
        command = [sys.executable, "-m", "autods", "run", str(config), *RANKS, *options, "--global-batch", "4"]
        command += ["--steps", str(steps), "--checkpoint-every", "3", "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=450, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(read_steps(out)) == [1, 2, 3, 4, 5]
    fit = json.loads((out / "fit" / "report.json").read_text())
    assert fit["certificate"]["failures"] == []
    assert fit["certificate"]["checkpoint"]["restored"] is True

    checkpoint = out / "checkpoints" / "step-00000005"
    command = [sys.executable, "zero_to_fp32.py", ".", "weights", "-t", "state"]
    subprocess.run(command, cwd=checkpoint, capture_output=True, check=True)
    model = load(make_source(config, lora=lora)).build()
    weights = torch.load(checkpoint / "weights" / "pytorch_model.bin")
    assert model.load_state_dict(weights, strict=False).unexpected_keys == []
    adapters = peft.get_peft_model_state_dict(model)
    assert any(weights.abs().max() > 0 for name, weights in adapters.items() if "lora_B" in name)  # they begin at zero
