"""A model.py is checked without being run."""

from __future__ import annotations

from pathlib import Path

import pytest

from autods.errors import InputError
from autods.workload import Workload, make_source

WHOLE = "def build_model(): ...\ndef build_batch(micro_batch_size): ...\n"


def model(folder: Path, text: str) -> Path:
    path = folder / "model.py"
    path.write_text(text)
    return path


def test_a_whole_model_is_a_source_without_running_it(tmp_path: Path) -> None:
    source = make_source(model(tmp_path, WHOLE + "raise SystemExit('it ran')\n"))
    assert source.name == "model"
    assert source.base_config is None


def test_the_file_may_bring_its_config_as_a_plain_dict(tmp_path: Path) -> None:
    source = make_source(model(tmp_path, WHOLE + 'DEEPSPEED_CONFIG = {"gradient_clipping": 1.0}\n'))
    assert source.base_config == {"gradient_clipping": 1.0}


def test_the_file_may_name_a_config_beside_it(tmp_path: Path) -> None:
    source = make_source(model(tmp_path, WHOLE + 'DEEPSPEED_CONFIG = "ds.json"\n'))
    assert source.base_config == str(tmp_path / "ds.json")


def test_a_config_that_has_to_be_computed_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model.py:3: DEEPSPEED_CONFIG") as error:
        make_source(model(tmp_path, WHOLE + "DEEPSPEED_CONFIG = dict(a=1)\n"))
    assert "--base-config" in str(error.value)


def test_a_config_with_a_type_beside_its_name_is_seen(tmp_path: Path) -> None:
    source = make_source(model(tmp_path, WHOLE + 'DEEPSPEED_CONFIG: dict = {"gradient_clipping": 1.0}\n'))
    assert source.base_config == {"gradient_clipping": 1.0}


@pytest.mark.parametrize(
    "text",
    [
        "from conf import DEEPSPEED_CONFIG\n",
        'DEEPSPEED_CONFIG = {"a": 1}\nDEEPSPEED_CONFIG["b"] = 2\n',
        'if fast:\n    DEEPSPEED_CONFIG = {"a": 1}\n',
        "DEEPSPEED_CONFIG = {[1]: 2}\n",
    ],
)
def test_a_config_that_only_running_the_file_would_tell_is_never_passed_over(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match="DEEPSPEED_CONFIG is neither a plain dict"):
        make_source(model(tmp_path, WHOLE + text))


def test_a_file_is_read_in_the_encoding_that_it_declares(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_bytes(("# -*- coding: latin-1 -*-\n" + WHOLE + "DEEPSPEED_CONFIG = 'größe.json'\n").encode("latin-1"))
    assert make_source(path).base_config == str(tmp_path / "größe.json")
    path.write_bytes(b"\xef\xbb\xbf" + WHOLE.encode())  # the mark that editors of Windows put first
    assert make_source(path).name == "model"


@pytest.mark.parametrize("missing", ["build_model", "build_batch"])
def test_a_missing_function_is_named(tmp_path: Path, missing: str) -> None:
    with pytest.raises(InputError, match=f"defines no {missing}"):
        make_source(model(tmp_path, WHOLE.replace(missing, "other")))


def test_functions_that_are_imported_or_assigned_count(tmp_path: Path) -> None:
    assert make_source(model(tmp_path, "from other import build_model\nbuild_batch = make()\n")).name == "model"


def test_a_syntax_error_names_line_and_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model.py:2: syntax error") as error:
        make_source(model(tmp_path, "x = 1\ndef build_model(:\n"))
    assert "def build_model(:" in str(error.value)


@pytest.mark.parametrize(("content", "said"), [(b"\xff\xfe\x00", "not a Python file"), (b"a\x00b", "syntax error")])
def test_a_file_that_is_no_python_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "model.py"
    path.write_bytes(content)
    with pytest.raises(InputError, match=said):
        make_source(path)


def test_a_changed_file_is_another_workload(tmp_path: Path) -> None:
    before = make_source(model(tmp_path, WHOLE)).digest
    assert make_source(model(tmp_path, WHOLE + "# changed\n")).digest != before


def test_a_changed_file_that_it_imports_is_another_workload(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("from parts import *\n")
    (tmp_path / "parts.py").write_text("width = 1\n")
    path = model(tmp_path, "from net import Net\n" + WHOLE)
    before = make_source(path).digest
    assert make_source(path).digest == before
    (tmp_path / "parts.py").write_text("width = 2\n")
    assert make_source(path).digest != before


def test_functions_are_sent_by_value(tmp_path: Path) -> None:
    made = Workload(build_model=lambda: 1, build_batch=lambda n: (n,), deepspeed_config={"gradient_clipping": 2.0})
    source = make_source(made, folder=tmp_path)
    assert Path(source.path).exists()
    assert source.base_config == {"gradient_clipping": 2.0}


def test_what_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    import threading

    lock = threading.Lock()
    with pytest.raises(InputError, match="cannot be sent"):
        make_source(Workload(build_model=lambda: lock, build_batch=lambda n: (n,)), folder=tmp_path)
