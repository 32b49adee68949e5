"""`autods explain` asks the installed DeepSpeed in a process of its own, and simulates a real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autods.cli.main import main
from autods.errors import EnvironmentBroken
from autods.explainer import installed
from autods.explainer.installed import ask_deepspeed, describe
from tests.support.ds_configs import GUIDE

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt.py"


def test_another_process_answers_as_this_one_does() -> None:
    answer = ask_deepspeed(GUIDE)
    assert answer == describe(GUIDE)
    assert json.dumps(answer.defaults["fp16.loss_scale"]) == "0"


def test_without_deepspeed_the_environment_is_at_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "deepspeed.py").write_text("raise ImportError('no DeepSpeed here')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(installed.__file__).parents[2]}")
    with pytest.raises(EnvironmentBroken, match="no DeepSpeed here"):
        ask_deepspeed({})


def test_a_real_model_shows_what_a_bucket_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zero = {"stage": 2, "reduce_bucket_size": 100_000_000}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": zero}))
    machine = ["--gpus", "8", "--gpu-memory", "16GiB", "--host-memory", "64GiB", "--json", "--quiet"]
    assert main(["explain", str(path), str(EXAMPLE), *machine]) == 0
    explanation = json.loads(capsys.readouterr().out)
    assert explanation["memory"]["verdict"] == "fits"
    costs = {key["key"]: key["measured"] for key in explanation["keys"] if key["measured"]}
    grown = costs["zero_optimization.reduce_bucket_size"]["tiers"]["device"]
    assert 150 * 2**20 < grown < 400 * 2**20  # 90 million elements of 2 bytes, twice where buckets overlap
