"""A Hugging Face config is a workload without downloading or building anything."""

from __future__ import annotations

import argparse
import json
import math
import runpy
from pathlib import Path
from typing import Any

import pytest

from autods.errors import InputError
from autods.system.host import data_folder
from autods.types import WorkloadSource
from autods.workload import load, make_source
from autods.workload.hf_config import describe_omissions, read_config
from autods.workload.protocol import WorkloadError

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def config(folder: Path, content: Any = LLAMA) -> Path:
    """A folder named `tiny` with this config.json."""
    path = folder / "tiny"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        make_source(path, **options)
    assert len(str(caught.value).splitlines()) <= 2
    return str(caught.value)


def test_a_folder_and_its_config_json_are_the_same_workload(tmp_path: Path) -> None:
    folder = config(tmp_path)
    source = make_source(folder)
    assert source == make_source(folder / "config.json")
    assert (source.kind, source.name, source.task) == ("hf_config", "tiny", "causal-lm")


@pytest.mark.parametrize(
    ("content", "task"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "causal-lm"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "seq2seq"),
        ({"model_type": "t5", "architectures": ["T5WithLMHeadModel"]}, "seq2seq"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "masked-lm"),
        ({"model_type": "bert", "architectures": ["BertForPreTraining"]}, "masked-lm"),
        ({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, "image-classification"),
        ({"model_type": "bert", "architectures": ["BertModel"]}, "causal-lm"),
        ({"model_type": "llama"}, "causal-lm"),
    ],
)
def test_the_task_follows_from_the_architectures(tmp_path: Path, content: dict[str, Any], task: str) -> None:
    assert make_source(config(tmp_path, content)).task == task


@pytest.mark.parametrize(
    ("name", "other_use"),
    [
        ("LlamaForSequenceClassification", "LlamaForSequenceClassification"),
        ("LlamaForCausalLM", None),
        ("Qwen3VLForConditionalGeneration", None),
        ("BertModel", None),
    ],
)
def test_a_model_for_none_of_the_tasks_is_named(tmp_path: Path, name: str, other_use: str | None) -> None:
    folder = config(tmp_path, {"model_type": "llama", "architectures": [name]})
    source = make_source(folder)
    assert source.other_use == other_use
    assert any(name in line for line in describe_omissions(source)) == (other_use is not None)
    assert make_source(folder, task="causal-lm").other_use is None


@pytest.mark.parametrize(
    ("section", "method"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "awq"),
        ({"quantization_config": None}, None),
    ],
)
def test_a_quantization_that_is_left_out_is_named(tmp_path: Path, section: dict[str, Any], method: str | None) -> None:
    source = make_source(config(tmp_path, LLAMA | section))
    lines = list(describe_omissions(source))
    assert source.quantization == method
    assert [f"quantization ({method}) is left out" in line for line in lines] == ([] if method is None else [True])


def test_a_model_that_needs_other_inputs_is_refused(tmp_path: Path) -> None:
    folder = config(tmp_path, {"model_type": "blip-2", "architectures": ["Blip2ForConditionalGeneration"]})
    with pytest.raises(WorkloadError, match="cannot train without pixel_values, which samples of causal-lm lack"):
        load(make_source(folder))


def test_a_requested_task_takes_precedence(tmp_path: Path) -> None:
    assert make_source(config(tmp_path), task="masked-lm").task == "masked-lm"


def test_length_and_task_change_the_digest(tmp_path: Path) -> None:
    folder = config(tmp_path)
    sources = [
        make_source(folder, **options) for options in ({"seq_len": 8}, {"seq_len": 9}, {"task": "masked-lm"}, {})
    ]
    assert len({source.digest for source in sources}) == 4


def test_numbers_without_json_are_read_as_transformers_saves_them(tmp_path: Path) -> None:
    limits = [0.0, {"__float__": "Infinity"}, {"__float__": "-Infinity"}]
    content = {**LLAMA, "time_step_limit": limits, "deeper": {"limit": {"__float__": "NaN"}}}
    read = read_config(config(tmp_path, content) / "config.json")
    assert read["time_step_limit"] == [0.0, math.inf, -math.inf]
    assert math.isnan(read["deeper"]["limit"])


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not JSON"),
        ('{"model_type": {"__float__": "many"}}', "could not convert string to float: 'many'"),
        ("[]", 'no "model_type"'),
        ('{"train_batch_size": 8}', 'no "model_type"'),
        ('{"model_type": 5}', 'no "model_type"'),
    ],
)
def test_a_file_without_a_model_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    message = refusal(config(tmp_path, content))
    assert problem in message
    assert str(tmp_path / "tiny" / "config.json") in message


def test_a_missing_path_is_refused_with_a_hint(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refusal(tmp_path / "config.json")
    (tmp_path / "empty").mkdir()
    assert "a folder without a config.json" in refusal(tmp_path / "empty")
    assert "models are not looked up by name" in refusal(tmp_path / "meta-llama" / "Llama-2-7b")


def test_options_that_do_not_apply_are_refused(tmp_path: Path) -> None:
    folder = config(tmp_path)
    assert "no task 'chat'" in refusal(folder, task="chat")
    assert "--target-len is for --task seq2seq" in refusal(folder, target_len=8)
    assert "--seq-len 0" in refusal(folder, seq_len=0)
    assert "--seq-len is for text" in refusal(folder, task="image-classification", seq_len=8)
    model = tmp_path / "model.py"
    model.write_text("def build_model(): ...\ndef build_batch(micro_batch_size): ...\n")
    assert "--task is for a Hugging Face config" in refusal(model, task="causal-lm")
    assert "--target-len is for a Hugging Face config" in refusal(model, target_len=8)
    assert "no argument seq_len" in refusal(model, seq_len=8)


def test_a_source_of_a_config_survives_json(tmp_path: Path) -> None:
    from dataclasses import asdict

    source = make_source(config(tmp_path), seq_len=8)
    assert WorkloadSource(**json.loads(json.dumps(asdict(source)))) == source


def test_a_folder_can_be_named_with_hf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = config(tmp_path)
    monkeypatch.chdir(tmp_path)
    same = make_source(folder)
    for name in ("hf:tiny", "hf:./tiny", "hf:./tiny/config.json", f"hf:{folder}"):
        assert make_source(Path(name)) == same


def test_a_name_on_the_hub_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("hf:Qwen/Qwen2-1.5B", "hf:none.json", "hf:", "hf:empty"):
        message = refusal(Path(name))
        assert "nothing is downloaded" in message
        assert "`hf download ORG/NAME config.json --local-dir NAME` fetches one" in message
        assert message.startswith(f"{name}: ")
    assert "has no config.json" in refusal(Path("hf:empty"))


def test_zero_init_changes_the_digest_of_every_model(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text("def build_model(): ...\ndef build_batch(n): ...\n")
    for path in (config(tmp_path), model):
        assert make_source(path, zero_init=True).zero_init
        assert (
            make_source(path, zero_init=True).digest
            != make_source(path).digest
            == make_source(path, zero_init=False).digest
        )


@pytest.fixture
def llava(tmp_path: Path) -> Path:
    """A small model that reads images, too."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = {"model_type": "llama", "vocab_size": 300, **sizes}
    vision = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, **sizes}
    return config(tmp_path, {"model_type": "llava", "text_config": text, "vision_config": vision})


def test_no_part_of_a_vision_language_model_keeps_a_cache(llava: Path) -> None:
    workload = load(make_source(llava, seq_len=8))
    assert workload.build()(**workload.build_batch(1)).past_key_values is None


def test_the_script_of_a_launch_trains_the_same_class(llava: Path) -> None:
    train = runpy.run_path(str(data_folder("examples") / "train.py"))
    asked = argparse.Namespace(model=llava, task="causal-lm", weights=False, seq_len=8)
    trained, workload = train["load_hugging_face"](asked), load(make_source(llava, seq_len=8))
    model = trained.build_model()
    assert type(model) is type(workload.build())
    assert model(**trained.build_batch(1)).past_key_values is None


@pytest.mark.parametrize("name", ["Llama4ForConditionalGeneration", "Llama4ForCausalLM"])
def test_a_config_that_names_one_of_two_models_gets_that_one(tmp_path: Path, name: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = {**sizes, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 300, "num_local_experts": 2}
    vision = {**sizes, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    llama4 = {"model_type": "llama4", "architectures": [name], "text_config": text, "vision_config": vision}
    folder = config(tmp_path, llama4)
    train = runpy.run_path(str(data_folder("examples") / "train.py"))
    asked = argparse.Namespace(model=folder, task="causal-lm", weights=False, seq_len=8)
    for model in (load(make_source(folder)).build(), train["load_hugging_face"](asked).build_model()):
        assert type(model).__name__ == name


@pytest.mark.parametrize(
    "kind", [{}, {"problem_type": "multi_label_classification"}, {"problem_type": "regression"}, {"num_labels": 1}]
)
def test_images_have_labels_that_the_configs_loss_takes(tmp_path: Path, kind: dict[str, Any]) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    vit = {"model_type": "vit", "image_size": 32, "num_labels": 3, **sizes, **kind}
    workload = load(make_source(config(tmp_path, vit), task="image-classification"))
    workload.build()(**workload.build_batch(2)).loss.backward()
