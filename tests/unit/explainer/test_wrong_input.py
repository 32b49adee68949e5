"""What is no config is refused in two lines; a config may be wrong in every way that can be explained."""

from __future__ import annotations

from typing import Any

import pytest

import autods
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
