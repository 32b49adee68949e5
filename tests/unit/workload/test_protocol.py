"""A model.py is checked without running it."""

from __future__ import annotations

from pathlib import Path

import pytest

from autods.errors import InputError
from autods.workload import make_source

COMPLETE = "def build_model(): ...\ndef build_batch(micro_batch_size): ...\n"


def model(folder: Path, text: str) -> Path:
    path = folder / "model.py"
    path.write_text(text)
    return path


def test_a_model_py_is_not_run(tmp_path: Path) -> None:
    source = make_source(model(tmp_path, COMPLETE + "raise SystemExit('it ran')\n"))
    assert source.name == "model"
    assert source.base_config is None


def test_a_config_may_be_a_plain_dict(tmp_path: Path) -> None:
    source = make_source(model(tmp_path, COMPLETE + 'DEEPSPEED_CONFIG = {"gradient_clipping": 1.0}\n'))
    assert source.base_config == {"gradient_clipping": 1.0}


def test_a_config_may_be_a_file_beside_it(tmp_path: Path) -> None:
    source = make_source(model(tmp_path, COMPLETE + 'DEEPSPEED_CONFIG = "ds.json"\n'))
    assert source.base_config == str(tmp_path / "ds.json")


def test_a_computed_config_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model.py:3: DEEPSPEED_CONFIG") as error:
        make_source(model(tmp_path, COMPLETE + "DEEPSPEED_CONFIG = dict(a=1)\n"))
    assert "--base-config" in str(error.value)


def test_a_config_may_be_annotated(tmp_path: Path) -> None:
    source = make_source(model(tmp_path, COMPLETE + 'DEEPSPEED_CONFIG: dict = {"gradient_clipping": 1.0}\n'))
    assert source.base_config == {"gradient_clipping": 1.0}


@pytest.mark.parametrize(
    "text",
    [
        "from conf import DEEPSPEED_CONFIG\n",
        'DEEPSPEED_CONFIG = {"a": 1}\nDEEPSPEED_CONFIG["b"] = 2\n',
        'DEEPSPEED_CONFIG = {"a": {"b": 1}}\nDEEPSPEED_CONFIG["a"]["b"] = 2\n',
        'DEEPSPEED_CONFIG = {"a": 1}\nDEEPSPEED_CONFIG.update(b=2)\n',
        'DEEPSPEED_CONFIG = {"a": {}}\nDEEPSPEED_CONFIG["a"].setdefault("b", 2)\n',
        'if fast:\n    DEEPSPEED_CONFIG = {"a": 1}\n',
        "DEEPSPEED_CONFIG = {[1]: 2}\n",
    ],
)
def test_a_config_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match="DEEPSPEED_CONFIG is neither a plain dict"):
        make_source(model(tmp_path, COMPLETE + text))


def test_a_file_is_read_in_its_declared_encoding(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_bytes(("# -*- coding: latin-1 -*-\n" + COMPLETE + "DEEPSPEED_CONFIG = 'größe.json'\n").encode("latin-1"))
    assert make_source(path).base_config == str(tmp_path / "größe.json")
    path.write_bytes(b"\xef\xbb\xbf" + COMPLETE.encode())  # the byte order mark of editors on Windows
    assert make_source(path).name == "model"


@pytest.mark.parametrize("missing", ["build_model", "build_batch"])
def test_a_missing_function_is_named(tmp_path: Path, missing: str) -> None:
    with pytest.raises(InputError, match=f"defines no {missing}"):
        make_source(model(tmp_path, COMPLETE.replace(missing, "other")))


def test_functions_may_be_imported_or_assigned(tmp_path: Path) -> None:
    assert make_source(model(tmp_path, "from other import build_model\nbuild_batch = make()\n")).name == "model"


def test_a_syntax_error_shows_line_and_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model.py:2: syntax error") as error:
        make_source(model(tmp_path, "x = 1\ndef build_model(:\n"))
    assert "def build_model(:" in str(error.value)


@pytest.mark.parametrize(("content", "message"), [(b"\xff\xfe\x00", "not a Python file"), (b"a\x00b", "syntax error")])
def test_a_file_that_is_not_python_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.py"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        make_source(path)
