"""The error that ended a script, in the user's terms."""

from __future__ import annotations

import os
import tempfile
from importlib.metadata import version

import pytest

from autods.rank.script.user_errors import cause_of_exit, explain, last_log_line
from autods.workload import WorkloadError


def raise_in(folder, code: str) -> BaseException:
    """The exception that a file of the user's with this code raises."""
    file = folder / "train.py"
    file.write_text(code)
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        exec(compile(code, str(file), "exec"), {})
    return caught.value


@pytest.mark.parametrize("name", ["from pytest import no_such_name", "import pytest.no_such_module"])
def test_a_failed_import_tells_the_installed_version(tmp_path, name):
    explained = explain(raise_in(tmp_path, name), "cuda")
    assert "no_such" in explained.problem
    assert f"pytest {pytest.__version__} is installed here" in explained.hint
    assert explained.place == f"{tmp_path}/train.py:1"


LAZY = "try: import no_such_package_anywhere\nexcept ImportError as error: raise RuntimeError('no trainer') from error"
UNINSTALLED = "from importlib.metadata import version; version('no_such_package_anywhere')"


@pytest.mark.parametrize("code", ["import no_such_package_anywhere", LAZY, UNINSTALLED])
def test_a_missing_package_is_to_be_installed(tmp_path, code):
    explained = explain(raise_in(tmp_path, code), "cuda")
    assert explained.problem == "it needs no_such_package_anywhere, which is not installed here"


def test_a_package_of_the_script_s_project_is_to_be_on_the_path(tmp_path):
    (tmp_path / "src/shop_of_this_test").mkdir(parents=True)
    (tmp_path / "src/shop_of_this_test/__init__.py").touch()
    (tmp_path / "scripts").mkdir()
    error = explain(raise_in(tmp_path / "scripts", "import shop_of_this_test"), "cuda")
    assert error.hint == f"it lies in {tmp_path}/src: PYTHONPATH={tmp_path}/src autods …"


@pytest.mark.parametrize(
    "code",
    [
        "import urllib.error; raise urllib.error.URLError('[Errno -2] Name or service not known')",
        """raise ConnectionError("Couldn't reach 'stsb' on the Hub (OfflineModeIsEnabled)")""",
    ],
)
def test_a_network_out_of_reach_is_told(tmp_path, code):
    error = explain(raise_in(tmp_path, code), "cuda")
    assert error.problem.startswith("it loads from a network that is out of reach here: ")
    assert error.hint.startswith("load it before")


def test_a_batch_divided_by_the_ranks_is_to_be_that_of_all(tmp_path):
    code = "from torch.utils.data import DataLoader; DataLoader([1], batch_size=0)"
    error = explain(raise_in(tmp_path, code), "cuda")
    assert error.problem.endswith("but got batch_size=0: does it divide the batch by the ranks?")
    assert error.hint.startswith("give it {train_batch_size}")


def test_a_name_that_another_version_has_tells_the_installed_one(tmp_path):
    error = explain(raise_in(tmp_path, "import pytest; pytest.Nothing"), "cuda")
    assert error.hint == f"installed here: pytest {version('pytest')}; the script may be written for another version"


def test_a_failed_lazy_import_tells_its_cause(tmp_path):
    line = "raise ModuleNotFoundError('Could not import X. Is it there?') from e"
    explained = explain(raise_in(tmp_path, f"try:\n    1 / 0\nexcept Exception as e:\n    {line}"), "cuda")
    assert explained.problem == "Could not import X, because of ZeroDivisionError: division by zero"
    assert "another version" in explained.hint


def test_a_name_missing_in_the_user_s_module_is_not_explained(tmp_path, monkeypatch):
    (tmp_path / "helper_of_mine.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    error = raise_in(tmp_path, "from helper_of_mine import nothing")
    assert explain(error, "cuda") is error


def exit_cause(folder, code: str, failure: Exception | None = None) -> BaseException:
    return cause_of_exit(raise_in(folder, code), failure)


def test_an_exit_while_handling_an_error_is_that_error(tmp_path):
    code = "try:\n    1 / 0\nexcept Exception:\n    raise SystemExit(1)"
    assert isinstance(exit_cause(tmp_path, code), ZeroDivisionError)


def test_a_failed_engine_call_is_the_cause_of_an_exit(tmp_path):
    failure = RuntimeError("out of memory")
    assert exit_cause(tmp_path, "raise SystemExit(1)", failure=failure) is failure


def test_an_exit_without_an_error_stays_an_exit(tmp_path):
    assert isinstance(exit_cause(tmp_path, "raise SystemExit(3)"), SystemExit)


@pytest.mark.parametrize(
    ("code", "problem"), [("3", "it left with exit code 3"), ("'no data'", "it left with the message: no data")]
)
def test_an_exit_is_explained_with_its_code_and_line(tmp_path, code, problem):
    explained = explain(raise_in(tmp_path, f"raise SystemExit({code})"), "cuda")
    assert explained.problem.startswith(problem)
    assert explained.place == f"{tmp_path}/train.py:1"


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
def test_an_error_about_missing_cuda_is_explained(error):
    explained = explain(error, "cpu")
    assert isinstance(explained, WorkloadError)
    assert "needs CUDA, and --device cpu has none" in explained.problem
    assert explain(error, "cuda") is error


def test_only_a_division_by_the_number_of_gpus_needs_cuda(tmp_path):
    code = "class torch:\n    class cuda:\n        device_count = lambda: 0\n"
    by_gpus = raise_in(tmp_path, code + "gpu = 3 % torch.cuda.device_count()")
    assert explain(by_gpus, "cpu").place == f"{tmp_path}/train.py:4"
    other = raise_in(tmp_path, "share = 3 / len([])")
    assert explain(other, "cpu") is other


def test_the_last_log_line_prefers_an_error(capfd):
    with tempfile.TemporaryFile() as log:
        kept = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            os.write(2, b"loading\nERROR: Could not consume arg: --lrr\nUsage: train.py [--lr LR]\n\n")
            assert last_log_line() == "ERROR: Could not consume arg: --lrr"
            os.write(2, b"\n".join(b"line %d" % number for number in range(20)))
            assert last_log_line() == "line 19"
        finally:
            os.dup2(kept, 2)


def test_a_parser_that_reads_an_empty_input_waits_for_input(tmp_path):
    message = "ValueError('Expecting value: line 1 column 1 (char 0)')"
    waits = raise_in(tmp_path, f"import sys\nif sys.stdin: raise {message}")
    assert explain(waits, "cuda").problem == "it waits for input, and a trial has no terminal"
    other = raise_in(tmp_path, f"raise {message}")
    assert explain(other, "cuda") is other


FAILED_PROGRAM = (
    "import subprocess\n"
    "subprocess.run('echo touch: out: Permission denied >&2; exit 1', shell=True, check=True, capture_output=True)"
)


@pytest.mark.parametrize(
    "code",
    [
        "raise PermissionError(13, 'Permission denied', 'out.h5')",
        "raise OSError('Unable to create file (unable to open file: errno = 13, flags = 13)')",
        "raise RuntimeError('I/O error: x (os error 13)')",
        FAILED_PROGRAM,
    ],
)
def test_a_write_that_the_kernel_refused_tells_how_to_allow_it(tmp_path, code):
    error = raise_in(tmp_path, code)
    explained = explain(error, "cpu", writes_confined=True)
    assert explained.problem.startswith("it may write only in the trial's own folders and in caches: ")
    assert "AUTODS_WRITABLE=FOLDER" in explained.hint
    assert explain(error, "cpu") is error


MISMATCH = """
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig
from transformers import TrainingArguments
config = HfTrainerDeepSpeedConfig({})
config.mismatches += ["- ds micro_batch=1 vs hf micro_batch=2", "- ds steps=4 vs hf steps=2"]
config.trainer_config_finalize(TrainingArguments(use_cpu=True), None, 1)
"""


@pytest.mark.parametrize("kind", [None, "deepspeed"])
def test_a_trainer_that_was_not_named_is_named_in_the_hint(tmp_path, kind):
    explained = explain(raise_in(tmp_path, MISMATCH), "cpu", kind=kind)
    assert "ds micro_batch=1 vs hf micro_batch=2; ds steps=4 vs hf steps=2" in explained.problem
    assert explained.hint.endswith("add --kind hf_trainer")
    error = raise_in(tmp_path, MISMATCH)
    assert explain(error, "cpu", kind="hf_trainer") is error


@pytest.mark.parametrize(
    "code",
    [
        "from transformers import TrainingArguments\nTrainingArguments(evaluation_strategy='no')",
        "from transformers import HfArgumentParser, TrainingArguments\n"
        "HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(['--evaluation_strategy', 'no'])",
        "from transformers import GPT2Config, GPT2LMHeadModel\nGPT2LMHeadModel()",
    ],
)
def test_a_call_for_another_version_tells_the_installed_one(tmp_path, code):
    explained = explain(raise_in(tmp_path, code), "cpu", kind="hf_trainer")
    assert "evaluation_strategy" in explained.problem or "missing 1 required" in explained.problem
    assert f"transformers {version('transformers')}" in explained.hint
    assert "another version" in explained.hint
    assert explained.place == f"{tmp_path}/train.py:2"


def test_a_library_that_miscalls_the_script_tells_its_version(tmp_path):
    code = "from torch.utils.data import DataLoader\ndef own(): ...\nnext(iter(DataLoader([1], collate_fn=own)))"
    explained = explain(raise_in(tmp_path, code), "cpu")
    assert f"torch {version('torch')}" in explained.hint
    assert explained.place == f"{tmp_path}/train.py:3"


def test_a_wrong_call_of_the_user_s_own_function_is_not_explained(tmp_path):
    error = raise_in(tmp_path, "def own_step(): ...\nown_step(1)")
    assert explain(error, "cpu", kind="hf_trainer") is error
