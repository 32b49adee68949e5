"""`--lora RANK[,NAMES]` is read before anything is built, and is part of the workload."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from autods.errors import EnvironmentBroken, InputError
from autods.types import WorkloadSource
from autods.workload import make_source
from autods.workload.lora import parse_lora


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama"}))
    return path


@pytest.mark.parametrize(
    ("value", "canonical"),
    [(8, "8,all-linear"), ("8", "8,all-linear"), ("16, q_proj ,v_proj,q_proj", "16,q_proj,v_proj")],
)
def test_a_rank_alone_means_all_linear_layers(value: str | int, canonical: str) -> None:
    assert str(parse_lora(value)) == canonical
    assert parse_lora(canonical) == parse_lora(value)


@pytest.mark.parametrize("value", ["", "q_proj", "0", "-4", "8,", "1e3", "70000", 10**9, "8,all-linear,q_proj", "٣x"])
def test_what_is_no_rank_is_refused_in_two_lines(value: str | int) -> None:
    with pytest.raises(InputError) as caught:
        parse_lora(value)
    assert str(caught.value).startswith("--lora ")
    assert "give --lora 16" in str(caught.value).splitlines()[1]


def test_adapters_are_part_of_the_workload(config: Path) -> None:
    sources = [make_source(config, lora=lora) for lora in (None, 8, "8,q_proj", 16)]
    assert len({source.digest for source in sources}) == 4
    for source in sources:
        assert WorkloadSource(**json.loads(json.dumps(asdict(source)))) == source
    assert make_source(config, lora="8") == make_source(config, lora="8,all-linear") == sources[1]


@pytest.mark.parametrize("text", ["import deepspeed", "def build_model(): ...\ndef build_batch(n): ..."])
def test_lora_is_for_a_config_alone(text: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    with pytest.raises(InputError, match="--lora"):
        make_source(path, lora=8)


def test_a_missing_peft_is_named_with_its_remedy(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def find_spec(name: str, *args: Any) -> Any:
        return None if name == "peft" else real(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(EnvironmentBroken) as caught:
        make_source(config, lora=8)
    assert str(caught.value).splitlines()[1].strip() == "pip install peft"
