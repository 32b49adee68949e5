"""Whether ranks can be forked from a process that has imported everything."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from autods.rank import preload
from autods.rank.preload import find_fork_hazard


@dataclass
class Nvml:
    open: int

    def nvmlShutdown(self) -> int:
        if not self.open:
            return 1
        self.open -= 1
        return 0


@dataclass
class Cuda:
    answer: int

    def cuDeviceGetCount(self, count: Any) -> int:
        return self.answer


def with_libraries(**libraries: Any) -> Callable[[str], Any]:
    return lambda name: libraries.get(name.removeprefix("lib").partition(".")[0].replace("-", "_"))


def test_nvml_is_shut_as_often_as_imports_opened_it() -> None:
    nvml = Nvml(open=3)
    preload.shut_nvml_down(with_libraries(nvidia_ml=nvml))
    assert nvml.open == 0
    preload.shut_nvml_down(with_libraries())  # not even loaded


@pytest.mark.parametrize(("answer", "began"), [(3, False), (0, True), (100, True)])
def test_cuda_initialized_by_another_package_is_noticed(answer: int, began: bool) -> None:
    assert preload.is_cuda_initialized(with_libraries(cuda=Cuda(answer))) is began


def test_cuda_that_is_not_loaded_is_not_initialized() -> None:
    assert not preload.is_cuda_initialized(with_libraries())
    assert preload.find_loaded_library("libno-such-library.so.1") is None


@pytest.mark.parametrize(
    ("links", "is_open"),
    [(["/dev/nvidia-uvm", "pipe:[1]"], True), (["/dev/nvidiactl", "/dev/nvidia0"], False), ([], False)],
)  # fmt: skip
def test_only_cudas_own_device_file_counts_as_open(links: list[str], is_open: bool) -> None:
    assert preload.has_device_open(links) is is_open


@pytest.mark.parametrize(
    ("torch_began", "driver_began", "device_held"),
    [(True, False, False), (False, True, False), (False, False, True)],
)
def test_a_process_that_initialized_cuda_is_not_forked(
    monkeypatch: pytest.MonkeyPatch, torch_began: bool, driver_began: bool, device_held: bool
) -> None:
    shut: list[bool] = []
    torch = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: torch_began))
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    monkeypatch.delenv("AUTODS_SPAWN", raising=False)
    monkeypatch.setattr(preload, "is_cuda_initialized", lambda: driver_began)
    monkeypatch.setattr(preload, "has_device_open", lambda: device_held)
    monkeypatch.setattr(preload, "shut_nvml_down", lambda: shut.append(True))
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
