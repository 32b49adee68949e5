import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from autods.runner import agent
from autods.trial import preload
from autods.trial.job import RankJob
from autods.trial.preload import find_fork_hazard
from autods.trial.worker import environment
from autods.types import Device, WorkloadSource
from tests.support.scripted_nvml import four

SOURCE = WorkloadSource(kind="file", path="/home/me/model.py", name="model", digest="abc")


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


def having(**libraries: Any) -> Callable[[str], Any]:
    return lambda name: libraries.get(name.removeprefix("lib").partition(".")[0].replace("-", "_"))


def test_nvml_is_shut_as_often_as_imports_opened_it() -> None:
    nvml = Nvml(open=3)
    preload.shut_nvml_down(having(nvidia_ml=nvml))
    assert nvml.open == 0
    preload.shut_nvml_down(having())  # not even loaded


@pytest.mark.parametrize(("answer", "began"), [(3, False), (0, True), (100, True)])
def test_a_driver_that_somebody_began_is_seen_though_torch_knows_nothing_of_it(answer: int, began: bool) -> None:
    assert preload.is_cuda_initialized(having(cuda=Cuda(answer))) is began


def test_a_driver_that_is_not_loaded_has_not_begun() -> None:
    assert not preload.is_cuda_initialized(having())
    assert preload.find_loaded_library("libno-such-library.so.1") is None


@pytest.mark.parametrize(
    ("links", "held"),
    [(["/dev/nvidia-uvm", "pipe:[1]"], True), (["/dev/nvidiactl", "/dev/nvidia0"], False), ([], False)],
)  # fmt: skip
def test_cudas_own_device_says_that_it_began_and_nvmls_do_not(links: list[str], held: bool) -> None:
    assert preload.has_device_open(lambda: links) is held


@pytest.mark.parametrize(
    ("torch_began", "driver_began", "device_held"),
    [(True, False, False), (False, True, False), (False, False, True)],
)
def test_a_process_in_which_cuda_began_by_whomever_is_not_forked(
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


def job(device: Device, ranks: int = 2) -> RankJob:
    return RankJob(
        job="train", source=SOURCE, device=device, folder="/f", scratch="/s", world_size=ranks,
        local_ranks=tuple(range(ranks)),
    )  # fmt: skip


def test_a_rank_takes_its_share_of_the_cores_unless_the_user_said_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autods.trial.worker.threads_per_rank", lambda ranks: max(1, 16 // ranks))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the zygote's
    assert environment(job("cuda"), 0, 1)["OMP_NUM_THREADS"] == "8"
    assert environment(job("cpu", 32), 0, 1)["OMP_NUM_THREADS"] == "1"
    assert environment(replace(job("cuda"), threads=4), 0, 1)["MKL_NUM_THREADS"] == "4"


def started(device: Device, monkeypatch: pytest.MonkeyPatch, **users: str) -> dict[str, str]:
    """The environment that a zygote is started in."""
    seen: dict[str, str] = {}

    class Process:
        pid = 1

        def __init__(self, argv: Any, *, env: dict[str, str], **rest: Any) -> None:
            seen.update(env)

    monkeypatch.setattr(agent.subprocess, "Popen", Process)
    agent.start_zygote(SOURCE, device, 0, "/dev/null", users).connection.close()
    return seen


def test_a_zygote_for_cards_counts_them_as_nvml_does_and_lets_nccl_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    said = started("cuda", monkeypatch, PATH="/bin", PYTORCH_ALLOC_CONF="expandable_segments:True")
    assert said["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert said["NCCL_DEBUG"] == "WARN"
    assert said["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert said["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert not {"MALLOC_ARENA_MAX", "DS_ACCELERATOR"} & set(said)


def test_what_the_user_set_for_cards_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")  # as Ray gives them to the actor
    said = started(
        "cuda", monkeypatch, NCCL_DEBUG="INFO", CUDA_DEVICE_ORDER="FASTEST_FIRST", OMP_NUM_THREADS="6",
        CUDA_VISIBLE_DEVICES="0,1,2,3",
    )  # fmt: skip
    assert (said["NCCL_DEBUG"], said["CUDA_DEVICE_ORDER"]) == ("INFO", "FASTEST_FIRST")
    assert said["OMP_NUM_THREADS"] == "1"  # the zygote forks; a rank gets those six
    assert said["CUDA_VISIBLE_DEVICES"] == "3,1"


def test_cards_that_are_named_by_uuid_are_given_to_ranks_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", four())  # type: ignore[arg-type]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-d,GPU-b")
    said = started("cuda", monkeypatch, CUDA_DEVICE_ORDER="FASTEST_FIRST")
    assert (said["CUDA_VISIBLE_DEVICES"], said["CUDA_DEVICE_ORDER"]) == ("3,1", "PCI_BUS_ID")


def test_a_zygote_of_cpu_ranks_sees_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    said = started("cpu", monkeypatch, CUDA_VISIBLE_DEVICES="0", MALLOC_ARENA_MAX="8")
    assert (said["CUDA_VISIBLE_DEVICES"], said["DS_ACCELERATOR"], said["MALLOC_ARENA_MAX"]) == ("", "cpu", "1")
