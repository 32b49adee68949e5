"""A Hugging Face model that stage 3 splits while it is built starts from the weights that its architecture asks for."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import autods
from autods.types import Fit
from autods.workload import Workload, partition_at_build

VOCABULARY = 2048
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 512, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}


def test_the_first_loss_is_that_of_guessing_and_falls(ray: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    report = autods.probe(
        f"hf:{tmp_path}", vary={"rung": ["zero3"]}, gpus=2, device="cpu", gpu_memory="2GiB", config="quick", repeats=1,
        seq_len=32, out=tmp_path / "out", precision="fp32", zero_init=True,
    )  # fmt: skip
    fit = report.trials[0].outcome
    assert isinstance(fit, Fit), fit
    assert fit.losses[0] == pytest.approx(math.log(VOCABULARY), rel=0.05)
    assert fit.losses[-1] < fit.losses[0]


def test_transformers_knows_stage_3_only_during_the_build() -> None:
    from transformers.integrations.deepspeed import deepspeed_config, is_deepspeed_zero3_enabled

    seen = []

    def build_model() -> None:
        seen.append((is_deepspeed_zero3_enabled(), deepspeed_config()))

    config = {"zero_optimization": {"stage": 3}}
    workload = Workload(build_model=build_model, build_batch=lambda micro_batch_size: ())  # type: ignore[arg-type]
    partition_at_build(workload, config).build_model()
    assert seen == [(True, config)]
    assert not is_deepspeed_zero3_enabled()
