from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autods.errors import InputError
from autods.types import WorkloadSource
from autods.workload import Workload, make_source

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def config(folder: Path, said: Any = LLAMA) -> Path:
    """A folder named `tiny` with that config.json."""
    path = folder / "tiny"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(said if isinstance(said, str) else json.dumps(said))
    return path


def refusal(path: Path, **said: Any) -> str:
    with pytest.raises(InputError) as caught:
        make_source(path, **said)
    assert len(str(caught.value).splitlines()) <= 2
    return str(caught.value)


def test_a_folder_and_its_config_json_are_the_same_workload(tmp_path: Path) -> None:
    folder = config(tmp_path)
    source = make_source(folder)
    assert source == make_source(folder / "config.json")
    assert (source.kind, source.name, source.task) == ("hf_config", "tiny", "causal-lm")


@pytest.mark.parametrize(
    ("said", "task"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "causal-lm"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "seq2seq"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "masked-lm"),
        ({"model_type": "bert", "architectures": ["BertForPreTraining"]}, "masked-lm"),
        ({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, "image-classification"),
        ({"model_type": "bert", "architectures": ["BertModel"]}, "causal-lm"),
        ({"model_type": "llama"}, "causal-lm"),
    ],
)
def test_the_task_is_that_of_the_architectures_else_causal_lm(tmp_path: Path, said: dict[str, Any], task: str) -> None:
    assert make_source(config(tmp_path, said)).task == task


def test_the_task_that_was_asked_for_wins(tmp_path: Path) -> None:
    assert make_source(config(tmp_path), task="masked-lm").task == "masked-lm"


def test_another_length_or_task_is_another_workload(tmp_path: Path) -> None:
    folder = config(tmp_path)
    sources = [make_source(folder, **said) for said in ({"seq_len": 8}, {"seq_len": 9}, {"task": "masked-lm"}, {})]
    assert len({source.digest for source in sources}) == 4


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("{", "is not JSON"),
        ("[]", 'no "model_type"'),
        ('{"train_batch_size": 8}', 'no "model_type"'),
        ('{"model_type": 5}', 'no "model_type"'),
    ],
)
def test_a_file_that_describes_no_model_is_refused(tmp_path: Path, said: str, why: str) -> None:
    told = refusal(config(tmp_path, said))
    assert why in told
    assert str(tmp_path / "tiny" / "config.json") in told


def test_what_is_not_there_is_refused_with_what_may_be_given(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refusal(tmp_path / "config.json")
    (tmp_path / "empty").mkdir()
    assert "a folder without a config.json" in refusal(tmp_path / "empty")
    assert "models are not looked up by name" in refusal(tmp_path / "meta-llama" / "Llama-2-7b")


def test_options_that_say_nothing_to_a_workload_are_refused(tmp_path: Path) -> None:
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


def test_a_model_py_whose_batch_takes_a_length_is_given_it(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text("def build_model(): ...\ndef build_batch(micro_batch_size, seq_len=16): return [seq_len]\n")
    from autods.workload import load

    assert load(make_source(model, seq_len=8)).build_batch(1) == [8]
    assert load(make_source(model)).build_batch(1) == [16]


def test_a_workload_object_whose_batch_takes_no_length_is_refused(tmp_path: Path) -> None:
    workload = Workload(build_model=lambda: None, build_batch=lambda n: {})  # type: ignore[arg-type,return-value]
    with pytest.raises(InputError, match="no argument seq_len"):
        make_source(workload, folder=tmp_path, seq_len=8)


def test_a_source_crosses_processes_as_json(tmp_path: Path) -> None:
    from dataclasses import asdict

    source = make_source(config(tmp_path), seq_len=8)
    assert WorkloadSource(**json.loads(json.dumps(asdict(source)))) == source


def test_checkpointing_that_build_model_turned_on_can_be_turned_off(tmp_path: Path) -> None:
    model = tmp_path / "checkpointed.py"
    model.write_text(
        "class Model:\n    recomputes = True\n    def gradient_checkpointing_disable(self): self.recomputes = False\n"
        "def build_model(): return Model()\ndef build_batch(micro_batch_size): ...\n"
    )
    from autods.workload import load

    assert load(make_source(model)).build_model().recomputes  # type: ignore[attr-defined]
    assert not load(make_source(model, recompute=False)).build_model().recomputes  # type: ignore[attr-defined]


def test_a_folder_may_be_said_to_be_hugging_faces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = config(tmp_path)
    monkeypatch.chdir(tmp_path)
    same = make_source(folder)
    for said in ("hf:tiny", "hf:./tiny", "hf:./tiny/config.json", f"hf:{folder}"):
        assert make_source(Path(said)) == same


def test_a_name_that_is_no_folder_says_that_nothing_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for said in ("hf:Qwen/Qwen2-1.5B", "hf:none.json", "hf:", "hf:empty"):
        told = refusal(Path(said))
        assert "nothing is downloaded" in told
        assert told.startswith(f"{said}: ")
    assert "has no config.json" in refusal(Path("hf:empty"))


def test_zero_init_is_of_a_config_and_makes_another_workload(tmp_path: Path) -> None:
    folder = config(tmp_path)
    assert make_source(folder, zero_init=True).zero_init
    assert (
        make_source(folder, zero_init=True).digest
        != make_source(folder).digest
        == make_source(folder, zero_init=False).digest
    )
    model = tmp_path / "model.py"
    model.write_text("def build_model(): ...\ndef build_batch(n): ...\n")
    assert "--zero-init is for a Hugging Face config" in refusal(model, zero_init=True)
