"""Long sequences: the part of a rank, the loss in tiles, and what has neither."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import autods
from autods.config.base_config import resolve_base_config
from autods.config.deepspeed import SEQUENCE_RANKS, count_replicas
from autods.errors import InputError
from autods.workload import Workload, WorkloadError, load, long_sequences, make_source
from autods.workload.long_sequences import IGNORED, find_most_sharers, take_part

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99,
}  # fmt: skip


def write(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def build(folder: Path, **options: Any) -> tuple[Workload, Any]:
    """The workload, and its model with the same weights each time."""
    workload = load(make_source(write(folder, LLAMA), seq_len=24, **options))
    torch.manual_seed(0)
    return workload, workload.build()


def test_the_parts_make_the_whole_sequence() -> None:
    tokens = torch.arange(16).reshape(2, 8)
    parts = [take_part({"input_ids": tokens, "labels": tokens}, index, 4, place="here") for index in range(4)]
    whole = {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}  # type: ignore[index, call-overload]
    assert torch.equal(whole["input_ids"], tokens)
    assert whole["position_ids"].tolist() == [list(range(8))] * 2
    last = torch.full((2, 1), IGNORED)
    assert torch.equal(whole["shift_labels"], torch.cat([tokens[:, 1:], last], dim=1))


def test_a_sequence_without_equal_parts_names_a_length_that_has() -> None:
    tokens = torch.zeros(1, 30, dtype=torch.long)
    with pytest.raises(WorkloadError, match=r"8 ranks cannot share sequences of 30 tokens\n.*--seq-len 24"):
        take_part({"input_ids": tokens, "labels": tokens}, 0, 8, place="here")


@pytest.mark.parametrize("ranks", [3, 8])
def test_heads_that_ranks_cannot_share_are_refused(ranks: int, tmp_path: Path) -> None:
    workload = load(make_source(write(tmp_path, LLAMA)))
    assert workload.share_sequences is not None
    with pytest.raises(WorkloadError, match=f"{ranks} ranks cannot share 4 heads of attention and 2 of keys"):
        workload.share_sequences(workload, ranks)


def test_tiles_give_the_loss_and_gradients_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_sequences, "_TILE_BYTES", 4 * 99 * 10)  # of ten tokens
    workload, whole = build(tmp_path)
    batch = workload.build_batch(2)
    assert isinstance(batch, dict)
    _, tiled = build(tmp_path, tiled_loss=True)
    losses = [model(**batch).loss for model in (whole, tiled)]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
    for loss in losses:
        (loss / 3).backward()  # as an engine divides by accumulation
    for weights, others in zip(whole.parameters(), tiled.parameters(), strict=True):
        torch.testing.assert_close(weights.grad, others.grad)


def test_logits_that_a_config_changes_have_no_tiles(tmp_path: Path) -> None:
    config = {**LLAMA, "model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 30.0}
    with pytest.raises(WorkloadError, match="--tiled-loss: its config has final_logit_softcapping"):
        load(make_source(write(tmp_path, config), tiled_loss=True)).build()


@pytest.mark.parametrize("options", [{"sequence_parallel": 2}, {"tiled_loss": True}])
def test_long_sequences_are_of_a_causal_config(options: dict[str, Any], tmp_path: Path) -> None:
    script, model = tmp_path / "train.py", tmp_path / "model.py"
    script.write_text("import deepspeed")
    model.write_text("def build_model(): ...\ndef build_batch(n): ...")
    encoder = write(tmp_path, {"model_type": "t5", "is_encoder_decoder": True})
    for path in (script, model, encoder):
        with pytest.raises(InputError, match=r"--sequence-parallel|--tiled-loss"):
            make_source(path, **options)


def test_ranks_of_a_sequence_reach_the_config_once(tmp_path: Path) -> None:
    source = make_source(write(tmp_path, LLAMA), sequence_parallel=4)
    plain = make_source(write(tmp_path, LLAMA))
    assert source.digest != plain.digest
    base = resolve_base_config(source, None, "auto", world_size=8, bf16=True)
    assert base == resolve_base_config(plain, {SEQUENCE_RANKS: 4}, "auto", world_size=8, bf16=True)
    assert count_replicas(base, 8) == 2
    with pytest.raises(InputError, match=f"--sequence-parallel 4, but {SEQUENCE_RANKS} is 2"):
        resolve_base_config(source, {SEQUENCE_RANKS: 2}, "auto", world_size=8, bf16=True)
    with pytest.raises(InputError, match="--sequence-parallel 4: the number of ranks, 6, is no multiple"):
        resolve_base_config(source, None, "auto", world_size=6, bf16=True)
    with pytest.raises(InputError, match="--sequence-parallel 0: at least one rank"):
        make_source(write(tmp_path, LLAMA), sequence_parallel=0)


def test_a_fit_of_a_config_with_shared_sequences_is_refused(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"gpus": 2, "device": "cpu", "gpu_memory": "1GiB", "base_config": {SEQUENCE_RANKS: 2}}
    for command in (autods.find_best_config, functools.partial(autods.run, steps=1)):
        with pytest.raises(InputError, match=f"{SEQUENCE_RANKS} 2: only a script trains so"):
            command(write(tmp_path, LLAMA), out=tmp_path / "out", **asked)


@pytest.mark.parametrize(
    ("config", "ranks", "most"),
    [(LLAMA, 8, 4), (LLAMA, 3, 1), ({"n_head": 12}, 8, 1), ({"num_attention_heads": 32}, 8, 8)],
)
def test_heads_limit_the_ranks_of_a_sequence(config: dict[str, Any], ranks: int, most: int) -> None:
    assert find_most_sharers(config, ranks) == most
