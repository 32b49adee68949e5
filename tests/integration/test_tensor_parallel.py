"""AutoTP: ranks that split a model's layers, as a plan forecasts them and as real ranks train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import autods
from autods.types import Fit

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 768,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1024, "max_position_embeddings": 64,
}  # fmt: skip
SPLIT = {"tensor_parallel": {"autotp_size": 2}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def test_a_rank_holds_its_part_of_the_layers(model: Path) -> None:
    options: dict[str, Any] = {"gpus": 4, "gpu_memory": "8GiB", "ladder": "ddp", "largest": False, "seq_len": 32}
    whole, split = (autods.plan(model, base_config=base, **options) for base in (None, SPLIT))
    (all_of_it,), (part,) = whole.sites[0].rungs, split.sites[0].rungs
    embedding = LLAMA["vocab_size"] * LLAMA["hidden_size"]  # nobody splits it
    share = (whole.facts.parameters + embedding) / 2 / whole.facts.parameters
    for kind in ("parameters", "optimizer"):
        assert part.breakdown[kind] / all_of_it.breakdown[kind] == pytest.approx(share, rel=0.02)


def test_ranks_that_split_layers_train_as_forecast(ray: object, model: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "gpus": 2, "device": "cpu", "gpu_memory": "2GiB", "seq_len": 32, "precision": "bf16", "base_config": SPLIT,
    }  # fmt: skip
    vary = {"rung": ["zero1"], "micro_batch": [2]}
    report = autods.probe(model, vary=vary, config="quick", repeats=1, out=tmp_path / "out", forecast=False, **asked)
    fit = report.trials[0].outcome
    assert isinstance(fit, Fit), fit
    (rung,) = autods.plan(model, ladder="zero1", micro_batch=2, largest=False, **asked).sites[0].rungs
    forecast = rung.memory["device"]
    assert forecast.low_bytes <= fit.device_peak_bytes <= forecast.high_bytes
    assert forecast.peak_bytes == pytest.approx(fit.device_peak_bytes, rel=0.1)


def test_a_head_whose_vocabulary_is_split_is_forecast(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "tie_word_embeddings": True}))
    report = autods.plan(path, gpus=2, gpu_memory="8GiB", ladder="zero1", largest=False, seq_len=32, base_config=SPLIT)
    assert report.sites[0].status == "fits"
