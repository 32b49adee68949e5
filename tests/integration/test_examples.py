"""Each example trains on two CPU ranks without autods: what a fit of them starts from.

One goes by DeepSpeed's own launcher. The ranks of the others are forked, which takes less time.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.launchers import cpu_env, deepspeeds_own

EXAMPLES = Path(__file__).parents[2] / "examples"
QWEN2_TINY = 1_017_984  # parameters

Done = subprocess.CompletedProcess[str]


def run(script: str, *args: object, folder: Path, launcher: Sequence[str]) -> Done:
    """The script on two ranks, from a folder of its own: what it writes lies there."""
    command = [sys.executable, "-m", *launcher, str(EXAMPLES / script), *map(str, args)]
    return subprocess.run(command, env=cpu_env(), cwd=folder, capture_output=True, text=True, timeout=400)


@pytest.fixture
def forked(rank_server):
    """Runs a script on two ranks that are forked."""
    return lambda script, *args, folder: rank_server.run(EXAMPLES / script, *args, folder=folder)


def falling(done: Done, *, steps: int) -> list[float]:
    """The losses of the rank that prints, which fall."""
    assert done.returncode == 0, done.stderr[-3000:]
    # Two ranks may print at once: a line need not begin where the one before has ended.
    losses = [float(loss) for loss in re.findall(r"step \d+\b.*?\bloss (\d+\.\d{4})", done.stdout)]
    assert len(losses) == steps
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-3:]) < sum(losses[:3])
    return losses


@pytest.mark.parametrize(("stage", "shared"), [(0, 1), (1, 2)])
def test_qwen2_reports_the_optimizer_elements_of_each_rank(tmp_path, forked, stage, shared):
    config = EXAMPLES / "qwen2" / f"ds_zero{stage}.json"
    done = forked("qwen2/train.py", "--deepspeed_config", config, "--max-steps", 8, "--seq-len", 32, folder=tmp_path)
    falling(done, steps=8)
    # Two ranks print at once: their lines may run into each other.
    said = re.findall(r"Device (\d) \| ZeRO Stage: (\d) .*?parameter count=(\d+)", done.stdout)
    assert sorted(said) == [(str(rank), str(stage), str(QWEN2_TINY // shared)) for rank in (0, 1)]


def test_the_conv_net_learns_the_digits(tmp_path):
    config = EXAMPLES / "cifar" / "ds_config.json"
    launcher = deepspeeds_own()
    done = run("cifar/cifar.py", "--deepspeed_config", config, "--epochs", 2, folder=tmp_path, launcher=launcher)
    falling(done, steps=58)
    assert float(re.findall(r"^epoch 2: (\S+)% right$", done.stdout, re.MULTILINE)[0]) > 60


def test_a_mixture_of_experts_learns_with_sharded_experts(tmp_path, forked):
    config = EXAMPLES / "cifar" / "ds_config.json"
    options = ("--deepspeed_config", config, "--ep-size", 2, "--max-steps", 20)
    falling(forked("cifar/cifar_moe.py", *options, folder=tmp_path), steps=20)


def test_the_pipeline_learns_under_zero_1(tmp_path, forked):
    config = EXAMPLES / "pipeline" / "ds_config.json"
    options = ("--deepspeed_config", config, "--steps", 8, "--seq-len", 32)
    falling(forked("pipeline/pipeline.py", *options, folder=tmp_path), steps=8)


def test_pre_training_follows_its_schedule_and_monitors(tmp_path, forked):
    config = EXAMPLES / "pretrain_script" / "ds_config_cpu.json"
    options = ("--config", config, "--max-steps", 6, "--layers", 2, "--width", 128, "--seq-len", 64)
    done = forked("pretrain_script/deepspeed_pretrain.py", *options, folder=tmp_path)
    falling(done, steps=6 * 2 * 2)  # both ranks print each of two micro batches
    assert "learning rate 5.00e-04 after 6 optimizer steps" in done.stdout  # half of the warm-up, which begins at 0
    assert list((tmp_path / "runs" / "DS_Pre_csv").glob("*lr.csv"))


def test_the_trainer_translates_under_zero_2(tmp_path, forked):
    config = json.loads((EXAMPLES / "t5_translation" / "ds_zero2.json").read_text())
    config["optimizer"]["params"]["torch_adam"] = True  # DeepSpeed's own is compiled for a minute where it is new
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    options = ["--do_train", "--do_eval", "--use_cpu", "--per_device_train_batch_size", 8, "--max_steps", 8]
    options += ["--learning_rate", "3e-3", "--logging_steps", 1, "--deepspeed", "ds_config.json", "--output_dir", "out"]
    done = forked("t5_translation/run_translation.py", *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    losses = [row["loss"] for row in state["log_history"] if "loss" in row]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    assert math.isfinite(json.loads((tmp_path / "out" / "eval_results.json").read_text())["eval_loss"])
