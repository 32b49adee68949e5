"""`autods explain` asks the installed DeepSpeed in a process of its own, and simulates a real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autods.cli.main import main
from autods.errors import EnvironmentBroken
from autods.explainer import installed
from autods.explainer.installed import ask_deepspeed, describe
from autods.explainer.toy_engine import ask_engine, find_refusals, start_toy
from autods.forecast.values import Simulator
from tests.support.ds_configs import GUIDE, TRAINER

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


@pytest.fixture(scope="module")
def toy() -> Iterator[Simulator]:
    with start_toy() as simulator:
        yield simulator


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {  # config, key that is named, words of the engine
    "an untested optimizer": (
        {"optimizer": {"type": "Lamb", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 1}},
        "optimizer.type",
        "has not tested ZeRO with the optimizer Lamb",
    ),
    "clipping in the optimizer": (
        {"optimizer": {"type": "Adam", "params": {"lr": 0.1, "max_grad_norm": 1.0}}},
        "optimizer.params.max_grad_norm",
        "is not supported as an optimizer parameter",
    ),
    "an argument of another optimizer": (
        {"optimizer": {"type": "Adagrad", "params": {"lr": 0.1, "freeze_step": 10}}},
        "optimizer.params.freeze_step",
        "Adagrad takes no such argument",
    ),
    "bf16 by its old name, and fp16": (
        {"bfloat16": {"enabled": True}, "fp16": {"enabled": True}},
        "bfloat16.enabled",
        "cannot be simultaneously enabled",
    ),
    "inputs in fp16 for weights in bf16": (
        {"bf16": {"enabled": True}, "fp16": {"auto_cast": True}},
        "deepspeed.initialize",
        "expected scalar type torch.float16 but found torch.bfloat16",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_engine_refuses_what_no_rule_knows(toy: Simulator, name: str) -> None:
    config, key, words = REFUSED[name]
    problem = ask_engine(toy, {"train_micro_batch_size_per_gpu": 1} | config, 8)
    assert problem is not None
    assert problem.severity == "error"
    assert problem.key == key
    assert words in problem.problem


def test_the_engine_says_all_that_it_has_against_an_optimizer() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Lamb", "params": {"lr": 0.1, "max_grad_norm": 1.0}},
        "zero_optimization": {"stage": 1},
    }
    argument, optimizer = find_refusals(config, 8)
    assert argument.key == "optimizer.params.max_grad_norm"
    assert "has not tested ZeRO with the optimizer Lamb" in optimizer.problem


@pytest.mark.parametrize("ranks", [None, 24])
def test_the_engine_trains_a_published_config(toy: Simulator, ranks: int | None) -> None:
    assert ask_engine(toy, GUIDE, ranks) is None
    assert ask_engine(toy, TRAINER | {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 1}, ranks) is None


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
