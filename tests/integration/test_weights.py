"""`--weights`: training starts from the weights of a sharded local checkpoint, in a fit, a run and plain DeepSpeed."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.support.run_jobs import read_steps

ROOT = Path(__file__).parents[2]
VOCABULARY, LENGTH, RANKS = 512, 16, 2
CONFIG = {
    "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights far from random ones, so that their loss is far from that of random ones."""
    folder = tmp_path_factory.mktemp("weights") / "checkpoint"
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG), dtype=torch.float32)
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(3)
    model.save_pretrained(folder, max_shard_size="300KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    return folder


def plain_loss(checkpoint: Path, tokens: torch.Tensor) -> float:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        return float(model(input_ids=tokens, labels=tokens).loss)


@pytest.mark.parametrize("rung", ["zero1", "zero3"])
def test_a_run_starts_from_the_weights(rung: str, checkpoint: Path, tmp_path: Path) -> None:
    """Its first step trains on all samples. The fit before it passes its certificate. One of the two has a forecast."""
    tokens = torch.randint(VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(3))
    numpy.save(tmp_path / "tokens.npy", tokens.flatten().numpy())
    command = [sys.executable, "-m", "autods", "run", f"hf:{checkpoint}", "--weights", "--ladder", rung]
    command += ["--gpus", str(RANKS), "--device", "cpu", "--gpu-memory", "1GiB", "--config", "quick"]
    command += ["--seq-len", str(LENGTH), "--precision", "fp32", "--global-batch", "4", "--steps", "2"]
    command += ["--data", str(tmp_path / "tokens.npy"), "--out", str(tmp_path / "out")]
    command += ["--no-forecast"] if rung == "zero1" else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=450, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert read_steps(tmp_path / "out")[1]["loss"] == pytest.approx(plain_loss(checkpoint, tokens), rel=1e-5)
    report = json.loads((tmp_path / "out" / "fit" / "report.json").read_text())
    assert report["certificate"]["failures"] == []


def train_plainly(checkpoint: Path, folder: Path, zero: Mapping[str, int], *options: str) -> float:
    """The first loss of examples/train.py."""
    config = folder / "ds_config.json"
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "optimizer": {
        "type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}}))  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS)]
    command += [str(ROOT / "examples/train.py"), "--deepspeed_config", str(config), "--model", str(checkpoint)]
    done = subprocess.run(
        [*command, "--seq-len", str(LENGTH), "--steps", "2", *options],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return float(re.findall(r"step 1: loss ([\d.]+)", done.stdout)[0])


@pytest.mark.parametrize("stage", [1, 3])
def test_plain_training_starts_from_the_weights(stage: int, checkpoint: Path, tmp_path: Path) -> None:
    """With --zero-init as in the printed line of a fit: it is for stage 3 alone."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    loss = train_plainly(checkpoint, tmp_path, zero, "--weights", "--zero-init")
    torch.manual_seed(0)  # as rank 0 does
    tokens = torch.randint(VOCABULARY, (2, LENGTH))
    assert loss == pytest.approx(plain_loss(checkpoint, tokens), abs=1e-3)


def test_a_model_built_in_parts_starts_from_its_usual_weights(checkpoint: Path, tmp_path: Path) -> None:
    """By the printed line with --zero-init: the first loss is that of a model that knows nothing yet."""
    loss = train_plainly(checkpoint, tmp_path, {"stage": 3}, "--zero-init")
    assert loss == pytest.approx(math.log(VOCABULARY), rel=0.1)
