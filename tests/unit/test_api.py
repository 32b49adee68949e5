from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import autods
from autods.api import FIT
from autods.arguments import OTHER_NAMES
from autods.config.settings import Settings
from autods.requests import FitRequest, PlanRequest, ProbeRequest, RunRequest


def settle(workload: str | Path | autods.Workload, **asked: Any) -> Settings:
    return FIT.resolve(FitRequest(workload, **asked))


MODEL = "def build_model(): ...\ndef build_batch(micro_batch_size): ...\n"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    return "model.py"


def test_a_ladder_may_be_a_list_or_text(model: str) -> None:
    asked = {"device": "cpu", "gpus": 2, "gpu_memory": "64MiB"}
    line = settle(model, ladder="zero3, ddp", **asked)
    assert [rung.name for rung in line.ladder] == ["ddp", "zero3"]
    assert settle(Path(model), ladder=["ddp", "zero3"], **asked) == line


def test_an_empty_ladder_is_wrong_not_the_default(model: str) -> None:
    with pytest.raises(autods.InputError, match="--ladder is empty"):
        settle(model, ladder="", device="cpu", gpus=2)


def test_a_workload_object_is_put_into_the_output_folder(model: str, tmp_path: Path) -> None:
    workload = autods.Workload(build_model=lambda: None, build_batch=lambda n: {})  # type: ignore[arg-type,return-value]
    settings = settle(workload, device="cpu", gpus=1, out=tmp_path / "out")
    assert Path(settings.source.path).parent == tmp_path / "out" / "workload"


@pytest.mark.parametrize("wrong", [{"device": "tpu"}, {"gpus": 0}, {"gpu_memory": "banana"}, {"precision": "int1"}])
def test_find_best_config_raises_what_the_command_line_says(model: str, wrong: dict[str, object]) -> None:
    asked = {"device": "cpu", "gpus": 2, **wrong}
    with pytest.raises(autods.InputError):
        autods.find_best_config(model, **asked)  # type: ignore[arg-type]


def test_a_missing_workload_is_named() -> None:
    with pytest.raises(autods.InputError, match=r"nowhere\.py"):
        autods.find_best_config("nowhere.py", device="cpu", gpus=1)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"gpus": "2"}, "gpus='2': a whole number is needed, not str"),
        ({"gpus": 2.0}, "gpus=2.0: a whole number is needed"),
        ({"gpus": True}, "gpus=True: a whole number is needed"),
        ({"global_batch": "64"}, "global_batch='64': a whole number is needed"),
        ({"max_trials": "5"}, "a whole number is needed"),
        ({"nodes": "2"}, "a whole number is needed"),
        ({"seed": None}, "seed=None: a whole number is needed"),
        ({"seed": -1}, "--seed -1: seeds are 0 to 4294967295"),
        ({"precision": None}, "precision=None: text is needed"),
        ({"gpu_memory": True}, "gpu_memory=True: a size"),
        ({"forecast": "no"}, "forecast='no': True or False is needed"),
        ({"base_config": [1]}, "a path or a dict is needed, not list"),
        ({"base_config": {"gradient_clipping": float("nan")}}, "cannot be written as JSON"),
        ({"strategies": "folder"}, "strategies='folder': a list is needed"),
        ({"script_args": "--epochs 3"}, "script_args='--epochs 3': a list is needed"),
        ({"out": ""}, "--out is empty"),
    ],
)
def test_a_value_of_another_type_is_named(model: str, asked: dict[str, object], said: str) -> None:
    with pytest.raises(autods.InputError, match=re.escape(said)):
        autods.find_best_config(model, **{"device": "cpu", "gpus": 2, **asked})  # type: ignore[arg-type]


@pytest.mark.parametrize("workload", [None, {"build_model": 1}, b"model.py", lambda: None, autods])
def test_what_is_no_workload_is_told(workload: object) -> None:
    with pytest.raises(autods.InputError, match=r"a workload is a path or an autods\.Workload, not "):
        autods.find_best_config(workload, device="cpu", gpus=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"build_model": 3}, "build_model is int, not a function"),
        ({"build_batch": None}, "build_batch is NoneType, not a function"),
        ({"loss": "mean"}, "loss is str, not a function"),
        ({"deepspeed_config": 5}, "deepspeed_config is int, not a dict"),
    ],
)
def test_a_part_of_a_workload_of_another_type_is_told(tmp_path: Path, wrong: dict[str, object], said: str) -> None:
    parts = {"build_model": lambda: None, "build_batch": lambda samples: None, **wrong}
    with pytest.raises(autods.InputError, match=f"the Workload's {said}"):
        autods.find_best_config(autods.Workload(**parts), out=tmp_path)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers(model: str) -> None:
    numpy = pytest.importorskip("numpy")
    plain = settle(model, device="cpu", gpus=2, gpu_memory="1GiB", global_batch=8)
    assert settle(model, device="cpu", gpus=numpy.int64(2), gpu_memory="1GiB", global_batch=numpy.int32(8)) == plain


@pytest.mark.parametrize("function", [autods.find_best_config, autods.plan, autods.probe])
def test_arguments_and_help_come_from_the_request(function: Callable[..., Any]) -> None:
    arguments = inspect.signature(function).parameters
    assert list(arguments)[:2] == ["workload", "script_args"]
    places = [str(function.__doc__).find(f"\n{name}: ") for name in arguments]
    assert min(places) > 0
    assert places[0] == min(places), "the workload comes first, as in the signature"
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\) has no argument 'gpu': did you mean 'gpus'\?"):
        function("model.py", gpu=1)


def test_other_tools_names_of_arguments_are_known() -> None:
    with pytest.raises(TypeError, match=r"plan\(\) has no argument 'nproc_per_node': did you mean 'gpus'\?"):
        autods.plan("model.py", nproc_per_node=8)  # type: ignore[call-arg]
    for request in (FitRequest, PlanRequest, RunRequest, ProbeRequest):
        own = {field.name for field in fields(request)}
        assert not own & {name for names in OTHER_NAMES.values() for name in names}


def test_a_misspelt_argument_of_diagnose_is_named() -> None:
    with pytest.raises(TypeError, match=r"diagnose\(\) has no argument 'exitcode': did you mean 'exit_code'\?"):
        autods.diagnose("", exitcode=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"diagnose\(\): missing a required argument: 'log'"):
        autods.diagnose()  # type: ignore[call-arg]


def test_a_name_of_other_tools_stands_for_one_argument() -> None:
    names = [name for names in OTHER_NAMES.values() for name in names]
    assert len(names) == len(set(names))


def test_signatures_have_plain_types_and_the_result() -> None:
    signature = inspect.signature(autods.find_best_config)
    assert signature.parameters["gpus"].annotation == int | None
    assert signature.return_annotation is autods.FitReport
    assert all("Argument" not in str(each.annotation) for each in signature.parameters.values())


def test_who_looks_for_fit_is_told_its_name_in_python() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'fit': did you mean 'find_best_config'\?"):
        autods.fit  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'dignose': did you mean 'diagnose'\?"):
        autods.dignose  # type: ignore[attr-defined]  # noqa: B018


def test_dir_lists_what_is_public_and_no_more() -> None:
    assert dir(autods) == sorted(autods.__all__)


def test_a_second_function_with_ranks_in_a_thread_is_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two would start and stop the one Ray of this process under each other."""
    asked: dict[str, Any] = {"device": "cpu", "gpus": 1, "gpu_memory": "64MiB"}
    errors: list[str] = []

    def run_while_another_does(settings: Settings, listen: object) -> None:
        with pytest.raises(autods.InputError, match="another function of autods runs ranks in this process") as raised:
            autods.probe(model, **asked)
        errors.append(str(raised.value))

    monkeypatch.setattr("autods.tuner.fit.fit", lambda settings, listen: run_while_another_does(settings, listen))
    for _ in range(2):  # the first has left it free again
        autods.find_best_config(model, **asked)
    assert [error.startswith("autods.probe cannot begin") for error in errors] == [True, True]
