"""Models that only a config describes: built with random weights by the installed transformers, batches to match."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autods.workload import WorkloadError, load, make_source
from autods.workload.hf_config import describe_omissions

SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SMALL, "vocab_size": 99, "max_position_embeddings": 64},
    "gpt2": {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 99, "n_positions": 48},
    "bert": {"model_type": "bert", "architectures": ["BertForMaskedLM"], **SMALL, "max_position_embeddings": 40},
    "roberta": {
        "model_type": "roberta", "architectures": ["RobertaForMaskedLM"], **SMALL, "max_position_embeddings": 34,
        "pad_token_id": 1,
    },
    "opt": {
        "model_type": "opt", "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "vocab_size": 99, "max_position_embeddings": 48,
    },
    "t5": {
        "model_type": "t5", "is_encoder_decoder": True, "d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2,
        "d_kv": 16, "vocab_size": 99,
    },
    "bart": {
        "model_type": "bart", "is_encoder_decoder": True, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "vocab_size": 99, "max_position_embeddings": 32,
    },
    "vit": {
        "model_type": "vit", "architectures": ["ViTForImageClassification"], **SMALL, "image_size": 32,
        "patch_size": 8,
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"], "text_config": {
            "model_type": "qwen2_5_vl_text", **SMALL, "num_key_value_heads": 2, "vocab_size": 99,
            "max_position_embeddings": 64, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
        },
        "vision_config": {
            "model_type": "qwen2_5_vl", "depth": 1, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2,
            "intermediate_size": 64, "fullatt_block_indexes": [0],
        },
    },
    "llava": {
        "model_type": "llava", "architectures": ["LlavaForConditionalGeneration"],
        "text_config": {"model_type": "llama", **SMALL, "vocab_size": 99, "max_position_embeddings": 64},
        "vision_config": {"model_type": "clip_vision_model", **SMALL, "image_size": 32, "patch_size": 8},
    },
    "qwen2_audio": {
        "model_type": "qwen2_audio", "architectures": ["Qwen2AudioForConditionalGeneration"],
        "text_config": {
            "model_type": "qwen2", **SMALL, "num_key_value_heads": 2, "vocab_size": 99, "max_position_embeddings": 64,
        },
        "audio_config": {
            "model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
        },
    },
}  # fmt: skip
IDLE = {"qwen2_5_vl": "vision", "llava": "vision", "qwen2_audio": "audio"}  # what samples of text do not use


def write(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_alone_is_a_workload_that_trains(name: str, tmp_path: Path) -> None:
    workload = load(make_source(write(tmp_path, CONFIGS[name])))
    model, batch = workload.build_model(), workload.build_batch(2)
    assert isinstance(batch, dict)
    loss = model(**batch).loss
    loss.backward()
    assert loss.dim() == 0
    assert all(tensor.shape[0] == 2 for tensor in batch.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_an_idle_part_of_a_model_is_said(name: str, tmp_path: Path) -> None:
    said = " ".join(describe_omissions(make_source(write(tmp_path, CONFIGS[name]))))
    assert said.startswith(f"samples of text alone: the {IDLE[name]} part") if name in IDLE else not said


LENGTHS = {"llama": 64, "gpt2": 48, "bert": 40, "roberta": 32, "opt": 48, "bart": 32, "t5": 2048}


@pytest.mark.parametrize(("name", "length"), LENGTHS.items())
def test_sequences_are_as_long_as_allowed_up_to_2048(name: str, length: int, tmp_path: Path) -> None:
    batch = load(make_source(write(tmp_path, CONFIGS[name]))).build_batch(1)
    assert batch["input_ids"].shape == (1, length)  # type: ignore[call-overload]


def test_the_batch_has_the_requested_lengths(tmp_path: Path) -> None:
    batch = load(make_source(write(tmp_path, CONFIGS["t5"]), seq_len=20, target_len=7)).build_batch(3)
    assert batch["input_ids"].shape == (3, 20)  # type: ignore[call-overload]
    assert batch["labels"].shape == (3, 7)  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["gpt2", "bert", "roberta", "opt", "bart"])
def test_learned_positions_bound_the_sequences(name: str, tmp_path: Path) -> None:
    path, length = write(tmp_path, CONFIGS[name]), LENGTHS[name]
    with pytest.raises(WorkloadError) as caught:
        load(make_source(path, seq_len=length + 1))
    assert f"--seq-len {length + 1}: the model has learned positions for {length} tokens" in str(caught.value)
    assert f"give --seq-len {length}, or less" in str(caught.value)


def test_rotary_positions_do_not_bound_the_sequences(tmp_path: Path) -> None:
    batch = load(make_source(write(tmp_path, CONFIGS["llama"]), seq_len=100)).build_batch(1)
    assert batch["input_ids"].shape == (1, 100)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("config", "task", "message"),
    [
        ({"model_type": "lamma"}, None, "has no architecture 'lamma'"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "x.Y"}}, None, "its custom code (auto_map) is never run"),
        (CONFIGS["bert"], "seq2seq", "bert has no model for --task seq2seq\n  give --task causal-lm or masked-lm"),
        (CONFIGS["vit"], "causal-lm", "vit has no model for --task causal-lm\n  give --task image-classification"),
        ({**CONFIGS["llama"], "hidden_size": "wide"}, None, "is not a config of llama"),
    ],
)
def test_a_config_transformers_cannot_build_is_refused(
    config: dict[str, Any], task: str | None, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path, config)
    with pytest.raises(WorkloadError) as caught:
        load(make_source(path, task=task))
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value).splitlines()) <= 2


_NEW_MODULES = """
import sys
from pathlib import Path
from autods.workload import load, make_source
workload = load(make_source(Path(sys.argv[1])))
before = set(sys.modules)
workload.build_model()
print(len(set(sys.modules) - before))
"""


def test_the_model_s_code_is_imported_with_the_workload(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _NEW_MODULES, str(write(tmp_path, CONFIGS["bert"]))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout.splitlines()[-1]) < 50
