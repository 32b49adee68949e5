"""What ended a script, in words that say whose fault it is."""

from __future__ import annotations

import os
import tempfile
from types import SimpleNamespace

import pytest

from autods.trial.script.callsite import Place
from autods.trial.script.cpu_ranks import told_of_cuda
from autods.trial.script.run import _last_words, _of_import, _waits_for_input, before_it_left


def raised(text: str) -> ImportError:
    with pytest.raises(ImportError) as caught:
        exec(text, {})
    return caught.value


def test_a_name_that_the_installed_version_lacks_is_told_with_the_version():
    what, hint = _of_import(raised("from pytest import no_such_name"))
    assert what == "cannot import name 'no_such_name' from 'pytest'"
    assert f"pytest {pytest.__version__} is installed here" in hint


def test_a_module_that_the_installed_version_lacks_is_told_with_the_version():
    what, hint = _of_import(raised("import pytest.no_such_module"))
    assert what.startswith("No module named 'pytest.no_such_module'")
    assert f"pytest {pytest.__version__} is installed here" in hint


def test_a_package_that_is_missing_is_no_matter_of_versions():
    assert _of_import(raised("import no_such_package_anywhere")) is None


def test_an_import_that_failed_deeper_is_told_with_its_cause():
    says = "raise ModuleNotFoundError('Could not import X. Is it there?') from e"
    text = f"try:\n    1 / 0\nexcept Exception as e:\n    {says}"
    what, hint = _of_import(raised(text))
    assert what == "Could not import X, because of ZeroDivisionError: division by zero"
    assert "another version" in hint


def test_a_name_that_the_scripts_own_module_lacks_is_told_as_python_does(tmp_path, monkeypatch):
    (tmp_path / "helper_of_mine.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert _of_import(raised("from helper_of_mine import nothing")) is None


def left(text: str, failure: Exception | None = None) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        exec(text, {})
    return before_it_left(caught.value, SimpleNamespace(failure=failure))


def test_a_script_that_prints_its_error_and_leaves_died_of_the_error():
    assert isinstance(left("try:\n    1 / 0\nexcept Exception:\n    raise SystemExit(1)"), ZeroDivisionError)


def test_what_its_engine_raised_counts_more_than_how_it_left():
    died = RuntimeError("out of memory")
    assert left("raise SystemExit(1)", failure=died) is died


def test_one_that_only_leaves_left():
    assert isinstance(left("raise SystemExit(3)"), SystemExit)


@pytest.mark.parametrize(
    "error",
    [
        AssertionError("Megatron requires CUDA."),
        RuntimeError("Cannot access accelerator device when none is available."),  # tensor.to(local_rank)
        RuntimeError("No supported gpu backend found!"),
        OSError("CUDA_HOME environment variable is not set. Please set it to your CUDA install root."),
        FileNotFoundError(2, "No such file or directory", "nvcc"),
        RuntimeError("No GPU found. A GPU is needed for quantization."),
    ],
)
def test_a_script_that_insists_on_cuda_is_told_so_where_there_is_none(error):
    assert "needs CUDA, and --device cpu has none" in told_of_cuda(error, None).what


def test_a_division_by_the_number_of_cards_needs_cuda_and_another_does_not():
    error = ZeroDivisionError("integer modulo by zero")
    assert told_of_cuda(error, Place("/x.py", 3, "gpu = rank % torch.cuda.device_count()")).where == "/x.py:3"
    assert told_of_cuda(error, Place("/x.py", 3, "share = total / len(data)")) is None


def test_the_last_line_of_the_log_that_speaks_of_an_error_is_quoted(capfd):
    with tempfile.TemporaryFile() as log:
        kept = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            os.write(2, b"loading\nERROR: Could not consume arg: --lrr\nUsage: train.py [--lr LR]\n\n")
            assert _last_words() == "ERROR: Could not consume arg: --lrr"
            os.write(2, b"\n".join(b"line %d" % one for one in range(20)))
            assert _last_words() == "line 19"
        finally:
            os.dup2(kept, 2)


def test_a_parser_that_finds_nothing_on_the_standard_input_waits_for_input():
    error = ValueError("Expecting value: line 1 column 1 (char 0)")
    assert _waits_for_input(error, Place("/x.py", 3, "config = json.load(sys.stdin)"))
    assert not _waits_for_input(error, Place("/x.py", 3, "config = json.load(open(path))"))
