"""Each check says what it found, and names what mends it where something is wrong."""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from autods.config.catalogue import read_catalogue
from autods.devices import Card, Finding
from autods.devices.torch_build import TorchBuild
from autods.errors import EnvironmentBroken
from autods.inspector import disk, machine
from autods.inspector.disk import check_nvme, find_file_system
from autods.report.results.doctor import Check
from autods.runner.health import Preflight
from autods.system.host import Hardware

GIB = 2**30
CARD = Card(index=0, name="NVIDIA A100-SXM4-80GB", total_bytes=80 * GIB, free_bytes=80 * GIB)
NODE = Hardware(
    cpu="a CPU",
    cores=64,
    host_bytes=512 * GIB,
    host_free_bytes=400 * GIB,
    cards=(CARD, CARD),
    driver="580.1",
    cuda="13.0",
)


def by_name(checks: Iterable[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def states(checks: Iterable[Check]) -> dict[str, str]:
    return {check.name: check.status for check in checks}


def test_healthy_cards_are_counted() -> None:
    checks = by_name(machine.check_cards(NODE))
    assert checks["cards"].result == "2 × NVIDIA A100-SXM4-80GB (80.0 GiB)"
    assert {check.status for check in checks.values()} == {"ok"}


def test_cards_that_cannot_be_used_name_the_remedy() -> None:
    broken = replace(NODE, unusable="torch 2.13.0 is built without CUDA\n  install a CUDA build of torch")
    (check,) = machine.check_cards(broken)
    assert (check.status, check.remedy) == ("broken", "install a CUDA build of torch")
    assert states(machine.check_cards(replace(NODE, cards=())))["cards"] == "warning"


def test_a_torch_for_amds_cards_is_told_what_works() -> None:
    build = TorchBuild(version="2.11.0+rocm7", cuda=None, rocm=True)
    cards = by_name(machine.check_cards(replace(NODE, cards=()), lambda: build))["cards"]
    assert (cards.status, "none of NVIDIA, which trials need" in cards.result) == ("warning", True)
    assert "autods plan works without (--on mi300x-192gb)" in cards.remedy
    assert "mi300x-192gb" in read_catalogue()


def test_cards_that_differ_or_are_shared_are_warned_of() -> None:
    old = replace(CARD, name="Tesla V100", bf16=False, others_bytes=3 * GIB, pids=(7,))
    checks = states(machine.check_cards(replace(NODE, cards=(CARD, old))))
    assert {name for name, status in checks.items() if status == "warning"} == {"equal cards", "shared", "bf16"}


def test_fewer_cores_than_cards_are_a_warning() -> None:
    shared = by_name(machine.check_memory(replace(NODE, cores=1), quota=1e9))["processors"]
    assert (shared.status, shared.result) == ("warning", "1 for 2 cards, and each rank wants one at least")
    assert states(machine.check_memory(replace(NODE, cores=2), quota=1e9))["processors"] == "ok"


def test_a_quota_of_processors_is_a_warning() -> None:
    assert states(machine.check_memory(NODE, quota=0.5))["processors"] == "warning"
    assert states(machine.check_memory(replace(NODE, host_bytes=100 * GIB)))["host"] == "warning"


@pytest.mark.parametrize(("free", "status"), [(GIB // 64, "broken"), (GIB // 16 - 4096, "warning"), (8 * GIB, "ok")])
def test_shared_memory_that_is_small_is_told(monkeypatch: pytest.MonkeyPatch, free: int, status: str) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: machine.shutil._ntuple_diskusage(free, 0, free))  # type: ignore[attr-defined]
    check = by_name(machine.check_memory(NODE))["/dev/shm"]
    assert check.status == status
    assert bool(check.remedy) == (status != "ok")


def test_missing_shared_memory_is_broken(tmp_path: Path) -> None:
    assert states(machine.check_memory(NODE, shared=tmp_path / "absent"))[str(tmp_path / "absent")] == "broken"


def test_only_limits_that_are_too_low_are_shown() -> None:
    assert list(machine.check_limits(lambda number: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))) == []
    low = {resource.RLIMIT_MEMLOCK: 65536, resource.RLIMIT_NOFILE: 256, resource.RLIMIT_NPROC: 100}
    checks = by_name(machine.check_limits(lambda number: (low.get(number, 2**40), 2**40), lambda: False))
    assert set(checks) == {"locked memory", "open files", "processes", "memory of a process"}
    assert checks["locked memory"].result.startswith("64.0 KiB")


def test_settings_that_slow_training_down_are_named() -> None:
    checks = by_name(
        machine.check_environment({"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "WARN", "CUDA_LAUNCH_BLOCKING": "1"})
    )
    assert set(checks) == {"NCCL_P2P_DISABLE=1", "CUDA_LAUNCH_BLOCKING=1"}
    assert checks["NCCL_P2P_DISABLE=1"].remedy == "unset NCCL_P2P_DISABLE"
    assert states(machine.check_environment({})) == {"environment": "ok"}


def test_an_old_kernel_has_no_landlock() -> None:
    assert states(machine.check_kernel(lambda: 0))["Landlock"] == "warning"
    assert states(machine.check_kernel(lambda: 2))["Landlock"] == "ok"


def test_a_folder_that_need_not_exist_yet_is_checked(tmp_path: Path) -> None:
    (check,) = machine.check_folders({"results": tmp_path / "a" / "b"})
    assert check.status in ("ok", "warning")
    assert str(tmp_path / "a" / "b") in check.result


def test_nvme_is_measured_and_leaves_no_file(tmp_path: Path) -> None:
    checks = by_name(check_nvme(tmp_path, file_bytes=16 * 2**20, file_system=lambda folder: "ext4"))
    assert checks[str(tmp_path)].status == "ok"
    bandwidth = checks["bandwidth"]
    assert "writes" in bandwidth.result or "direct I/O fails" in bandwidth.result
    assert list(tmp_path.iterdir()) == []
    assert states(check_nvme(tmp_path / "absent"))[str(tmp_path / "absent")] == "broken"


def test_a_folder_in_memory_is_no_nvme(tmp_path: Path) -> None:
    (check,) = check_nvme(tmp_path, file_system=lambda folder: "tmpfs")
    assert (check.status, check.result) == ("broken", "it is host memory (tmpfs), so offloading to it saves none")


def test_the_kernel_tells_the_file_system_of_a_folder(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    line = "36 35 {} / /mnt rw,noatime master:1 - {} /dev/x rw\n"
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts.write_text(line.format("7:77777", "ext4") + line.format(number, "tmpfs"))
    assert find_file_system(tmp_path, mounts) == "tmpfs"
    assert find_file_system(tmp_path, tmp_path / "absent") == ""


def test_a_folder_that_cannot_be_written_is_no_lack_of_direct_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path, file_bytes: int) -> tuple[float, float]:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(disk, "measure_bandwidth", refuse)
    check = by_name(check_nvme(tmp_path, file_bytes=0, file_system=lambda folder: "ext4"))["bandwidth"]
    assert (check.status, check.result) == ("broken", "it cannot be measured: Permission denied")
    assert check.remedy == f"make {tmp_path} writable, or name another one"


def test_a_file_as_nvme_is_not_made_a_folder(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    check = by_name(check_nvme(tmp_path / "x"))[str(tmp_path / "x")]
    assert (check.status, check.result, check.remedy) == ("broken", "it is a file", "name a folder on the disk")


def test_who_may_lock_any_memory_is_not_warned_of_its_limit() -> None:
    low = {resource.RLIMIT_MEMLOCK: (65536, 65536)}
    infinite = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert list(machine.check_limits(lambda number: low.get(number, infinite), lambda: True)) == []


def test_root_of_a_rootless_container_may_not_lock_any_memory(tmp_path: Path) -> None:
    (tmp_path / "uid_map").write_text("         0       1000          1\n")
    assert not machine.may_lock_memory(tmp_path / "uid_map")


def test_numa_nodes_are_those_to_which_ranks_can_be_bound() -> None:
    assert "NUMA" not in by_name(machine.check_memory(NODE))
    numa = by_name(machine.check_memory(replace(NODE, numa_nodes=2)))["NUMA"]
    assert (numa.status, numa.result) == ("ok", "2 nodes")
    assert numa.remedy.endswith("apt-get install numactl, then deepspeed --bind_cores_to_rank")


def test_ranks_that_are_healthy_show_their_links_and_rate() -> None:
    slow = Finding(text="card 1 (H100) is throttled: too hot", remedy="look at the fans")
    preflight = Preflight(findings=(slow,), links="NVLink between 28 of 28 pairs of cards", reduced_per_s=300 * GIB)
    ranks, links, rate = machine.check_ranks(lambda: preflight)
    assert (ranks.status, ranks.result, ranks.remedy) == ("warning", slow.text, slow.remedy)
    assert (links.status, links.result) == ("ok", preflight.links)
    assert (rate.status, rate.result) == ("ok", "300.0 GiB/s from each rank")


def test_ranks_that_cannot_train_are_broken() -> None:
    def measure() -> Preflight:
        raise EnvironmentBroken("the ranks do not reach each other: timed out\n  look at the firewall")

    (check,) = machine.check_ranks(measure)
    assert (check.status, check.remedy) == ("broken", "look at the firewall")


def test_a_host_name_without_an_address_gets_its_line_of_hosts() -> None:
    def resolve(name: str, port: None) -> None:
        if name != "localhost":
            raise OSError("Name or service not known")

    (check,) = machine.check_names(resolve)
    assert (check.status, check.remedy) == ("warning", f'echo "127.0.0.1 {socket.gethostname()}" >> /etc/hosts')
    assert states(machine.check_names(lambda name, port: None)) == {"host names": "ok"}
