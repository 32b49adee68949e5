"""The weights of a local folder: which files are taken, what is refused before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.numpy
from numpy import zeros

from autods.errors import InputError
from autods.workload import make_source

TENSORS = {"a": zeros(4, "float32"), "b": zeros(8, "float32")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def write_shards(folder: Path) -> None:
    for name, tensor in TENSORS.items():
        safetensors.numpy.save_file({name: tensor}, folder / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in TENSORS}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def refusal(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        make_source(folder, weights=True)
    assert len(str(caught.value).splitlines()) <= 2
    return str(caught.value)


def test_weights_are_a_file_or_the_shards_of_an_index(folder: Path) -> None:
    plain = make_source(folder)
    write_shards(folder)
    sharded = make_source(folder, weights=True)
    safetensors.numpy.save_file(TENSORS, folder / "model.safetensors")
    whole = make_source(folder, weights=True)
    assert sharded.weights
    assert sharded.zero_init
    assert len({plain.digest, sharded.digest, whole.digest}) == 3
    assert make_source(folder) == plain


@pytest.mark.parametrize("header", [b"[]", b'{"a": 1}', b'{"a": {}}', b'{"a": {"data_offsets": [0]}}'])
def test_json_that_is_no_header_is_no_safetensors_file(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "model.safetensors: is no safetensors file" in refusal(folder)


def test_a_folder_without_whole_weights_is_refused(folder: Path) -> None:
    assert "has no model.safetensors and no model.safetensors.index.json" in refusal(folder)
    (folder / "pytorch_model.bin").touch()
    assert "a pickle may run code" in refusal(folder)
    write_shards(folder)
    (folder / "b.safetensors").write_bytes((folder / "b.safetensors").read_bytes()[:-1])
    assert "b.safetensors: is cut short" in refusal(folder)
    (folder / "b.safetensors").write_text("version https://git-lfs")
    assert "b.safetensors: is no safetensors file" in refusal(folder)
    (folder / "b.safetensors").unlink()
    assert "b.safetensors: cannot be read" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../a.safetensors"}}')
    assert "is no index of shards" in refusal(folder)


def test_quantized_weights_are_refused_before_anything_starts(folder: Path) -> None:
    write_shards(folder)
    quantized = {"model_type": "llama", "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(quantized))
    message = refusal(folder)
    assert "its weights are quantized (mxfp4)" in message
    assert "the original model" in message


def test_weights_are_for_a_hugging_face_config(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text("def build_model(): ...\ndef build_batch(micro_batch_size): ...\n")
    with pytest.raises(InputError, match="--weights is for a Hugging Face config"):
        make_source(model, weights=True)
