"""`--lora [4bit:]RANK[,NAMES]` is read before anything is built, and is part of the workload."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from autods.errors import EnvironmentBroken, InputError
from autods.types import WorkloadSource
from autods.workload import WorkloadError, make_source
from autods.workload.lora import add_lora, parse_lora


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama"}))
    return path


@pytest.mark.parametrize(
    ("value", "canonical"),
    [
        (8, "8,all-linear"), ("8", "8,all-linear"), ("16, q_proj ,v_proj,q_proj", "16,q_proj,v_proj"),
        ("4bit:8", "4bit:8,all-linear"), (" 4bit: 8,q_proj", "4bit:8,q_proj"),
    ],
)  # fmt: skip
def test_a_rank_alone_means_all_linear_layers(value: str | int, canonical: str) -> None:
    assert str(parse_lora(value)) == canonical
    assert parse_lora(canonical) == parse_lora(value)


@pytest.mark.parametrize(
    "value", ["", "q_proj", "0", "-4", "8,", "1e3", "70000", 10**9, "8,all-linear,q_proj", "٣x", "4bit:", "8bit:8"]
)
def test_what_is_no_rank_is_refused_in_two_lines(value: str | int) -> None:
    with pytest.raises(InputError) as caught:
        parse_lora(value)
    assert str(caught.value).startswith("--lora ")
    assert "give --lora 16" in str(caught.value).splitlines()[1]


def test_adapters_are_part_of_the_workload(config: Path, packages: set[str]) -> None:
    sources = [make_source(config, lora=lora) for lora in (None, 8, "8,q_proj", 16, "4bit:8")]
    assert len({source.digest for source in sources}) == 5
    for source in sources:
        assert WorkloadSource(**json.loads(json.dumps(asdict(source)))) == source
    assert make_source(config, lora="8") == make_source(config, lora="8,all-linear") == sources[1]


@pytest.mark.parametrize("text", ["import deepspeed", "def build_model(): ...\ndef build_batch(n): ..."])
def test_lora_is_for_a_config_alone(text: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    with pytest.raises(InputError, match="--lora"):
        make_source(path, lora=8)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The packages that seem to be installed."""
    installed = {"peft", "bitsandbytes", "accelerate"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: name if name in installed else None)
    return installed


@pytest.mark.parametrize(("lora", "package"), [("8", "peft"), ("4bit:8", "peft"), ("4bit:8", "bitsandbytes")])
def test_a_missing_package_is_named_with_its_remedy(lora: str, package: str, config: Path, packages: set[str]) -> None:
    packages.remove(package)
    with pytest.raises(EnvironmentBroken) as caught:
        make_source(config, lora=lora)
    assert str(caught.value).splitlines()[1].strip() == f"pip install {package}"


def test_4_bit_weights_are_not_built_in_parts(config: Path, packages: set[str]) -> None:
    with pytest.raises(InputError, match="--zero-init: 4-bit weights"):
        make_source(config, lora="4bit:8", zero_init=True)
    assert make_source(config, lora="8", zero_init=True).zero_init


def test_weights_that_are_partitioned_are_not_quantized() -> None:
    """A plan that proposes --zero-init tries it."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model[0].weight.ds_id = 0  # as deepspeed.zero.Init marks it
    with pytest.raises(WorkloadError, match="--zero-init: 4-bit weights"):
        add_lora(model, lora=parse_lora("4bit:2"), place="config.json")
