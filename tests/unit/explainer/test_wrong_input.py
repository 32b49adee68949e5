"""What is no config is refused in two lines; a config may be wrong in every way that can be explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import autods
from autods.cli.main import main
from autods.errors import InputError


def nested(depth: int) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for _ in range(depth):
        config = {"deeper": config}
    return config


def holding_itself() -> dict[str, Any]:
    config: dict[str, Any] = {}
    config["again"] = config
    return config


@pytest.mark.parametrize(
    "config",
    [
        {"a": object()}, {"a": b"bytes"}, {"a": {1, 2}}, {"a": float("nan")}, {"a": float("inf")}, {"a": 10**400},
        nested(100_000), holding_itself(),
    ],
    ids=["object", "bytes", "set", "nan", "infinity", "10^400", "deep", "circular"],
)  # fmt: skip
def test_what_json_does_not_have_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="cannot be written as JSON"):
        autods.explain(config)


@pytest.mark.parametrize("gpus", [-1, 0, 10**40])
def test_ranks_that_cannot_be_are_refused(gpus: int) -> None:
    with pytest.raises(InputError, match="--gpus"):
        autods.explain({"train_batch_size": 8}, gpus=gpus)


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
@pytest.mark.parametrize("params", [[1], 3, "lr", None, {1: 2}])
def test_params_of_any_kind_are_explained(section: str, params: Any) -> None:
    explanation = autods.explain({section: {"type": "Adam", "params": params}})
    assert section in {key.key.partition(".")[0] for key in explanation.keys}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("on", "a100-80gb"), ("device", "cpu"), ("seq_len", 8), ("nodes", 2), ("micro_batch", 1), ("kind", "script"),
        ("task", "seq2seq"), ("target_len", 8), ("gpu_memory", "16GiB"), ("host_memory", 2**30), ("nvme", "1TiB"),
    ],
)  # fmt: skip
def test_an_option_about_a_workload_needs_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: Any
) -> None:
    option = f"--{name.replace('_', '-')}"
    with pytest.raises(InputError, match=f"{option} has no effect without a workload"):
        autods.explain({}, **{name: value})
    (tmp_path / "x.json").write_text("{}")
    assert main(["explain", str(tmp_path / "x.json"), option, str(value)]) == 2
    assert f"{option} has no effect" in capsys.readouterr().err


def test_arguments_of_a_script_need_one() -> None:
    with pytest.raises(InputError, match="-- ARGS has no effect without a workload"):
        autods.explain({}, script_args=["--lr", "3"])
