"""Whether ranks can be forked from a process that has imported everything."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from autods.devices import cuda
from autods.rank import preload
from autods.rank.preload import compile_at_first_call, find_fork_hazard
from autods.workload import make_source


def test_a_deferred_function_is_compiled_once_when_called() -> None:
    compiled: list[str] = []

    def compile(function: Callable[..., int]) -> Callable[..., int]:
        compiled.append(function.__name__)
        return lambda *args, **kwargs: 10 * function(*args, **kwargs)

    def add(first: int, second: int) -> int:
        return first + second

    deferred = compile_at_first_call(compile, add)
    assert (deferred.__name__, compiled) == ("add", [])
    assert [deferred(1, second=2), deferred(3, 4)] == [30, 70]
    assert compiled == ["add"]


@pytest.mark.parametrize(
    ("first_line", "names"),
    [
        ("import transformers", ["transformers.modeling_utils"]),
        ("import os, transformers\nos.environ['HF_HOME'] = '/'", []),  # which transformers reads when it is imported
        ("import torch", []),
    ],
)
def test_what_a_scripts_ranks_import_is_imported_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first_line: str, names: list[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{first_line}\nimport deepspeed\nengine = deepspeed.initialize(model=None)\n")
    imported: list[str] = []
    monkeypatch.setattr(preload.importlib, "import_module", imported.append)
    preload.preload_trainer(make_source(script))
    assert imported == names


@pytest.mark.parametrize(("torch_began", "driver_began"), [(True, False), (False, True)])
def test_a_process_that_initialized_cuda_is_not_forked(
    monkeypatch: pytest.MonkeyPatch, torch_began: bool, driver_began: bool
) -> None:
    shut: list[bool] = []
    torch = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: torch_began))
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    monkeypatch.delenv("AUTODS_SPAWN", raising=False)
    monkeypatch.setattr(cuda, "is_cuda_initialized", lambda: driver_began)
    monkeypatch.setattr(cuda, "shut_nvml_down", lambda: shut.append(True))
    assert find_fork_hazard() == "CUDA was initialised while importing"
    assert shut == [True]


def test_the_processor_is_asked_once_for_all_forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = pytest.importorskip("cpuinfo")
    asked: list[str] = []

    def get_cpu_info() -> dict[str, str]:
        asked.append("processor")
        return {"vendor_id_raw": "AuthenticAMD"}

    monkeypatch.setattr(cpuinfo, "get_cpu_info", get_cpu_info)
    preload.remember_processor.cache_clear()
    try:
        preload.remember_processor()
        preload.remember_processor()
        assert cpuinfo.get_cpu_info() == {"vendor_id_raw": "AuthenticAMD"}
    finally:
        preload.remember_processor.cache_clear()
    assert asked == ["processor"]


def test_a_processor_that_cannot_be_read_is_the_ranks_error(monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = pytest.importorskip("cpuinfo")

    def get_cpu_info() -> dict[str, str]:
        raise ValueError("no JSON")

    monkeypatch.setattr(cpuinfo, "get_cpu_info", get_cpu_info)
    preload.remember_processor.cache_clear()
    try:
        preload.remember_processor()
        with pytest.raises(ValueError, match="no JSON"):
            cpuinfo.get_cpu_info()
    finally:
        preload.remember_processor.cache_clear()
