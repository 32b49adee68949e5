"""The Python API: every wrong value of every argument is an InputError that names it."""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path

import numpy
import pytest

import autods
from autods import api
from autods.errors import InputError
from autods.requests import FitRequest, PlanRequest, ProbeRequest
from tests.support.bad_workloads import GOOD


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no text for you")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("nor comparisons")

    __hash__ = object.__hash__


class Lying:
    def __fspath__(self) -> str:
        return 5  # type: ignore[return-value]


LOOP: dict[str, object] = {}
LOOP["loop"] = LOOP
DEEP: dict[str, object] = {}
for _ in range(5000):
    DEEP = {"a": DEEP}
# Values that suit no argument, by name. What some argument accepts is in ACCEPTED.
WRONG: Mapping[str, object] = {
    "an object": object(),
    "an object without text": Unprintable(),
    "a path that lies": Lying(),
    "bytes": b"x",
    "bytes of a path": os.fsencode("/tmp/x"),
    "NUL": "a\0b",
    "a path with NUL": Path("a\0b"),
    "half a surrogate": "a\ud800",
    "a path with half a surrogate": Path("a\ud800"),
    "a long name": "x" * 300,
    "a long path": "d/" * 2500,
    "nothing": "",
    "NaN": float("nan"),
    "infinity": float("inf"),
    "1e308": 1e308,
    "10^5000": 10**5000,
    "-10^40": -(10**40),
    "a complex number": 1j,
    "True": True,
    "numpy's True": numpy.True_,
    "an array": numpy.arange(3),
    "a number of numpy": numpy.int64(2),
    "a set of numbers": {1},
    "a list of numbers": [1.5],
    "a list of None": [None],
    "a list of NUL": ["a\0"],
    "numbers without end": itertools.count(),
    "a dict of numbers": {5: [1]},
    "a loop": LOOP,
    "a deep dict": DEEP,
    "a function": len,
    "a class": int,
    "None": None,
}
REQUESTS = {"fit": (FitRequest, api.FIT), "plan": (PlanRequest, api.PLAN), "probe": (ProbeRequest, api.PROBE)}
MACHINE = {"fit": {"device": "cpu", "gpu_memory": "1GiB"}, "plan": {"gpu_memory": "16GiB"}}
MACHINE["probe"] = {**MACHINE["fit"], "vary": {"micro_batch": [1]}}


def list_arguments() -> list[tuple[str, str]]:
    return [(command, each.name) for command, (request, _) in REQUESTS.items() for each in fields(request)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("api") / "model.py"
    path.write_text(GOOD)
    return path


@pytest.mark.parametrize(("command", "name"), list_arguments())
def test_each_wrong_value_of_an_argument_is_refused(model: Path, command: str, name: str) -> None:
    request, use_case = REQUESTS[command]
    for value_name, value in WRONG.items():
        arguments = {"workload": model, "gpus": 2, **MACHINE[command], name: value}
        try:
            use_case.resolve(request(**arguments))
        except InputError:
            continue
        except Exception as error:
            pytest.fail(f"{command} {name}: {value_name}: {type(error).__name__}: {error}")


def test_a_path_a_text_and_numpys_numbers_are_accepted(model: Path) -> None:
    for workload, gpus in itertools.product((model, str(model)), (2, numpy.int64(2), numpy.uint8(2))):
        request = FitRequest(workload=workload, gpus=gpus, device="cpu", gpu_memory=numpy.float64(2**30))
        settings = api.FIT.resolve(request)
        assert (settings.gpus, type(settings.gpus), settings.device_bytes) == (2, int, 2**30)


def test_ranks_of_a_probe_may_be_numpys(model: Path) -> None:
    request = ProbeRequest(workload=model, gpus=numpy.int64(2), device="cpu", gpu_memory="1GiB", vary=["micro_batch=1"])
    assert api.PROBE.resolve(request).settings.gpus == 2


LOGS: Mapping[str, Callable[[], object]] = {
    "a number": lambda: autods.diagnose(5),
    "bytes": lambda: autods.diagnose(b"CUDA out of memory"),
    "None": lambda: autods.diagnose(None),
    "True": lambda: autods.diagnose(True),
    "a list of numbers": lambda: autods.diagnose([5]),
    "a list of bytes": lambda: autods.diagnose([b"x"]),
    "texts of numbers": lambda: autods.diagnose({"rank 0": 5}),
    "names of numbers": lambda: autods.diagnose({5: "x"}),
    "a path with NUL": lambda: autods.diagnose(Path("a\0b")),
    "a path with half a surrogate": lambda: autods.diagnose(Path("a\ud800")),
    "a path that lies": lambda: autods.diagnose([Lying()]),
    "a long name": lambda: autods.diagnose(Path("x" * 300)),
    "a list of nothing": lambda: autods.diagnose([""]),
    "paths without end": lambda: autods.diagnose(itertools.repeat("x")),
    "no file": lambda: autods.diagnose(Path("/gone/x")),
    "a device": lambda: autods.diagnose(Path("/dev/zero")),
    "an exit code of text": lambda: autods.diagnose("", exit_code="z"),
    "an exit code of True": lambda: autods.diagnose("", exit_code=True),
    "an exit code of 1.5": lambda: autods.diagnose("", exit_code=1.5),
    "an exit code of NaN": lambda: autods.diagnose("", exit_code=float("nan")),
    "an exit code of 10^5000": lambda: autods.diagnose("", exit_code=10**5000),
}


@pytest.mark.parametrize("wrong", LOGS)
def test_a_wrong_argument_of_diagnose_is_refused(wrong: str) -> None:
    with pytest.raises(InputError) as error:
        LOGS[wrong]()
    assert inspect.cleandoc(str(error.value))


def test_a_line_that_names_a_file_is_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.log").write_text("RuntimeError: CUDA out of memory.\n")
    monkeypatch.chdir(tmp_path)
    assert autods.diagnose("train.log").tier == "device"
    assert autods.diagnose("no such file.log").kind == "none"


def test_diagnose_takes_texts_with_any_characters() -> None:
    assert autods.diagnose("a\0b\ud800 CUDA out of memory").kind in ("out_of_memory", "none")
    assert autods.diagnose({"rank 0": "", "": "RuntimeError: CUDA out of memory."}, numpy.int64(1)).tier == "device"
