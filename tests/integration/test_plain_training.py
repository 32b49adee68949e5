"""The config that a fit emits trains in a plain DeepSpeed script, by torchrun and by DeepSpeed's own launcher."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autods.config.deepspeed import compose, start_settings
from autods.config.strategies import read_rungs
from autods.types import Knobs, ModelFacts
from tests.support.fits import HERE, question
from tests.support.launchers import deepspeeds_own, torchrun

TRAIN = HERE.parents[1] / "examples" / "train.py"


@pytest.fixture(scope="module")
def ds_config(tmp_path_factory) -> Path:
    """As a fit writes it when ZeRO-3 is the answer."""
    folder = tmp_path_factory.mktemp("emitted")
    base = question("tiny.py", folder).base | {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    }
    facts = ModelFacts(
        parameters=577, largest_parameter=512, checkpointing=False, tokens_per_sample=None, has_optimizer=False
    )
    rung = read_rungs(())["zero3"]
    settings = start_settings(rung, base=base, device_bytes=2**30, facts=facts)
    knobs = Knobs(micro_batch=4, accumulation=2, checkpointing=False, settings=settings)
    config = compose(rung, knobs, base=base, world_size=2, own_optimizer=False)
    (folder / "ds_config.json").write_text(json.dumps(config))
    return folder / "ds_config.json"


def train(launcher: list[str], ds_config: Path, *options: str) -> subprocess.CompletedProcess[str]:
    said = ["--deepspeed_config", str(ds_config), "--model", str(HERE / "workloads" / "tiny.py"), "--steps", "20"]
    # No GPU, so that the test asks the same everywhere; gloo's threads need no more than one core.
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *launcher, str(TRAIN), *said, *options]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)


def losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    return [float(loss) for loss in re.findall(r"step \d+: loss (\d+\.\d{3})", done.stdout)]


@pytest.mark.parametrize("launcher", [torchrun, deepspeeds_own])
def test_the_loss_falls_over_20_steps(ds_config, launcher):
    done = train(launcher(), ds_config, *(["--memory-budget", "256MiB"] if launcher is torchrun else []))
    assert done.returncode == 0, done.stderr[-2000:]
    seen = losses(done)
    assert len(seen) == 20
    assert seen[-1] < seen[0]


def test_a_rank_really_cannot_take_more_than_its_budget(ds_config):
    done = train(torchrun(), ds_config, "--memory-budget", "1MiB")
    assert done.returncode != 0
    assert not losses(done)
