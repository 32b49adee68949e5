import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from autods.cgroup import MemoryGroup
from autods.hardware import host_memory, look, versions, visible_cards


class FakeNvml(ModuleType):
    """As much of NVML as is asked of it: `count` cards of 16 GiB with UUIDs GPU-a, GPU-b, …"""

    class NVMLError(Exception):
        pass

    def __init__(self, count: int, *, driver: bool = True) -> None:
        super().__init__("pynvml")
        self.count, self.driver, self.open = count, driver, False

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.NVMLError("no driver")
        self.open = True

    def nvmlShutdown(self) -> None:
        self.open = False

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if not 0 <= index < self.count:
            raise self.NVMLError("not found")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if len(uuid) != 5 or not 0 <= (index := ord(uuid[-1]) - ord("a")) < self.count:
            raise self.NVMLError("not found")
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=16 * 2**30, free=(16 - handle) * 2**30)

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "A Card"


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("0,1", [0, 1]),
        (" 3 , 1", [3, 1]),
        ("GPU-c,0", [2, 0]),
        ("", []),
        ("-1", []),
        ("1,-1,2", [1]),
        ("0,9,1", [0]),
        ("GPU-z", []),
    ],
)
def test_cuda_visible_devices_is_honoured_as_cuda_does(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, indices: list[int]
) -> None:
    nvml = FakeNvml(4)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert [card.index for card in visible_cards(visible)] == indices
    assert not nvml.open


def test_a_card_says_its_name_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(2))
    card = visible_cards("1")[0]
    assert (card.name, card.total_bytes, card.free_bytes) == ("A Card", 16 * 2**30, 15 * 2**30)


def test_a_machine_without_a_driver_shows_no_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(0, driver=False))
    assert visible_cards(None) == ()


def test_this_machine_has_cores_and_memory() -> None:
    here = look()
    assert here.cores >= 1
    assert here.host_bytes >= here.host_free_bytes > 0
    assert here.cpu


def test_versions_name_what_decides_a_result() -> None:
    found = versions()
    assert {"python", "autods", "torch", "deepspeed", "ray", "optuna", "transformers"} == set(found)
    assert "not installed" not in found.values()


def test_a_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    for name, said in {"memory.max": 2**20, "memory.current": 2**18}.items():
        (tmp_path / name).write_text(str(said))
    memory = host_memory((MemoryGroup(folder=tmp_path, version=2),))
    assert (memory.total_bytes, memory.free_bytes) == (2**20, 2**20 - 2**18)
