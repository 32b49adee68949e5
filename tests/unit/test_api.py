from __future__ import annotations

from pathlib import Path

import pytest

import autods
from autods.api import settle

MODEL = "def build_model(): ...\ndef build_batch(micro_batch_size): ...\n"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    return "model.py"


def test_a_path_may_be_text_and_a_ladder_a_list_or_a_line(model: str) -> None:
    asked = {"device": "cpu", "gpus": 2, "gpu_memory": "64MiB"}
    line = settle(model, ladder="zero3, ddp", **asked)
    assert [rung.name for rung in line.ladder] == ["ddp", "zero3"]
    assert settle(Path(model), ladder=["ddp", "zero3"], **asked) == line


def test_an_empty_ladder_on_the_command_line_is_wrong_not_the_default(model: str) -> None:
    with pytest.raises(autods.InputError, match="no rung ''"):
        settle(model, ladder="", device="cpu", gpus=2)


def test_a_workload_object_is_put_into_the_output_folder(model: str, tmp_path: Path) -> None:
    workload = autods.Workload(build_model=lambda: None, build_batch=lambda n: {})  # type: ignore[arg-type,return-value]
    settings = settle(workload, device="cpu", gpus=1, out=tmp_path / "out")
    assert Path(settings.source.path).parent == tmp_path / "out"


@pytest.mark.parametrize("wrong", [{"device": "tpu"}, {"gpus": 0}, {"gpu_memory": "banana"}, {"precision": "int1"}])
def test_find_best_config_raises_what_the_command_line_says(model: str, wrong: dict[str, object]) -> None:
    asked = {"device": "cpu", "gpus": 2, **wrong}
    with pytest.raises(autods.InputError):
        autods.find_best_config(model, **asked)  # type: ignore[arg-type]


def test_a_missing_workload_is_named() -> None:
    with pytest.raises(autods.InputError, match=r"nowhere\.py"):
        autods.find_best_config("nowhere.py", device="cpu", gpus=1)
