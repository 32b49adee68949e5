"""Ulysses and the tiled loss on a Hugging Face config: real ranks that share sequences, and their forecast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import autods
from autods.types import Fit

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 768,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1024, "max_position_embeddings": 256,
}  # fmt: skip


def test_ranks_that_share_sequences_train_like_one(ray: object, tmp_path: Path) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps(LLAMA))
    asked: dict[str, Any] = {"device": "cpu", "gpu_memory": "2GiB", "seq_len": 256, "precision": "fp32"}
    shared: dict[str, Any] = {**asked, "gpus": 2, "sequence_parallel": 2, "tiled_loss": True}
    losses = []
    for rung, options in (("ddp", {**asked, "gpus": 1}), ("zero1", shared)):
        report = autods.probe(
            model, vary={"rung": [rung], "micro_batch": [2]}, config="quick", repeats=1, forecast=False,
            out=tmp_path / rung, **options,
        )  # fmt: skip
        fit = report.trials[0].outcome
        assert isinstance(fit, Fit), fit
        losses.append(fit.losses)
    steps = min(map(len, losses))
    assert losses[1][:steps] == pytest.approx(losses[0][:steps], rel=1e-3)

    (forecast,) = autods.plan(model, ladder="zero1", micro_batch=2, largest=False, **shared).sites[0].rungs
    assert forecast.memory["device"].peak_bytes == pytest.approx(fit.device_peak_bytes, rel=0.1)
