"""What transformers' models define is read once, and again when a source has changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autods.rank.transformers_models import read_models


class Reader:
    """Stands in for transformers' function, and counts its calls."""

    def __init__(self) -> None:
        self.paths: list[str | Path] = []

    def __call__(self, path: str | Path) -> dict[str, object]:
        self.paths.append(path)
        return {"gpt": {frozenset({"torch"}): {"modeling_gpt": {"Gpt"}}}}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTODS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "transformers" / "models"
    (folder / "gpt").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "gpt" / "modeling_gpt.py").write_text("__all__ = ['Gpt']\n")
    return folder


def test_the_models_are_read_once(models: Path) -> None:
    read = Reader()
    answers = [read_models(read, path) for path in (models, str(models), models / "__init__.py")]
    assert read.paths == [models]
    assert answers == 3 * [Reader()(models)]


def test_a_changed_source_is_read_anew(models: Path) -> None:
    read = Reader()
    read_models(read, models)
    (models / "gpt" / "modeling_gpt.py").write_text("__all__ = ['Gpt', 'Gpt2']\n")
    read_models(read, models)
    (models / "gpt" / "__pycache__").mkdir()
    (models / "gpt" / "__pycache__" / "modeling_gpt.pyc").write_bytes(b"compiled")  # no source
    read_models(read, models)
    assert len(read.paths) == 2


def test_one_models_folder_is_always_read(models: Path) -> None:
    read = Reader()
    for _ in range(2):
        read_models(read, models / "gpt")
    assert read.paths == [models / "gpt"] * 2


@pytest.mark.parametrize("harm", ["damaged", "written by others", "not writable"])
def test_a_cache_that_cannot_be_used_is_done_without(models: Path, tmp_path: Path, harm: str) -> None:
    read, folder = Reader(), tmp_path / "cache" / "transformers"
    if harm == "not writable":
        folder.parent.mkdir()
        folder.write_text("a file in its place")
    read_models(read, models)
    if harm != "not writable":
        (kept,) = folder.iterdir()
        if harm == "damaged":
            kept.write_bytes(b"?")
        else:
            kept.chmod(0o666)
    assert read_models(read, models) == Reader()(models)
    assert len(read.paths) == 2


_IMPORT = """
from autods.rank import transformers_models
from autods.rank.patching import when_imported
when_imported("transformers.utils.import_utils", transformers_models.remember_models)
import transformers
from transformers.models import auto, llama
print(len(dir(transformers)), transformers.LlamaConfig.__name__, auto.AutoModel.__name__, llama.LlamaModel.__module__)
"""


@pytest.mark.timeout(100)  # it imports transformers three times
def test_transformers_is_the_same_with_and_without(tmp_path: Path) -> None:
    plain = "\n".join(line for line in _IMPORT.splitlines() if "autods" not in line and "when_" not in line)
    printed = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "AUTODS_CACHE": str(tmp_path)},
            capture_output=True, text=True, check=True,
        ).stdout
        for code in (plain, _IMPORT, _IMPORT)
    ]  # fmt: skip
    assert printed[0] == printed[1] == printed[2]
    assert "LlamaConfig" in printed[0]
    assert len(list((tmp_path / "transformers").iterdir())) == 1
