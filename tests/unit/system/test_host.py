import os
from pathlib import Path

import psutil
import pytest

from autods.errors import EnvironmentBroken
from autods.system.host import (
    MemoryGroup,
    cache_folder,
    find_card_nodes,
    find_interface,
    installed_versions,
    read_hardware,
    read_host_memory,
)


def test_this_machine_has_cores_and_memory() -> None:
    here = read_hardware()
    assert here.cores >= 1
    assert here.host_bytes >= here.host_free_bytes > 0
    assert here.cpu


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "0:0:0:0:0:0:0:1", "localhost"])
def test_an_interface_is_found_by_each_form_of_its_address(address: str) -> None:
    assert find_interface(address) == "lo"


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1", ""])
def test_an_address_of_no_interface_has_none(address: str) -> None:
    assert find_interface(address) is None


def test_versions_name_what_decides_a_result() -> None:
    found = installed_versions()
    assert {"python", "autods", "torch", "deepspeed", "ray", "optuna", "transformers"} == set(found)
    assert "not installed" not in found.values()


def test_a_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    for name, said in {"memory.max": 2**20, "memory.current": 2**18}.items():
        (tmp_path / name).write_text(str(said))
    memory = read_host_memory((MemoryGroup(folder=tmp_path, version=2),))
    assert (memory.total_bytes, memory.free_bytes) == (2**20, 2**20 - 2**18)


def test_reserved_huge_pages_are_no_memory_for_programs(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nHugePages_Total:       4\nHugetlb:            8192 kB\n")
    here = read_host_memory((), card_nodes=())
    assert read_host_memory((), tmp_path / "meminfo", ()).total_bytes == psutil.virtual_memory().total - 2**23
    assert here.total_bytes <= psutil.virtual_memory().total


def write_node(devices: Path, number: int, cpus: str, total_kb: int, free_kb: int) -> Path:
    """A NUMA node as /sys shows it."""
    (folder := devices / f"node/node{number}").mkdir(parents=True)
    (folder / "cpulist").write_text(f"{cpus}\n")
    lines = f"Node {number} MemTotal:  {total_kb} kB\nNode {number} MemFree:  {free_kb} kB\n"
    (folder / "meminfo").write_text(f"{lines}Node {number} HugePages_Total: 0\n")
    return folder


def test_memory_of_cards_that_is_a_numa_node_is_not_the_hosts(tmp_path: Path) -> None:
    write_node(tmp_path, 0, "0-71", 400 * 2**20, 300 * 2**20)
    cards = [write_node(tmp_path, number, "", 4096, 1024) for number in (1, 9)]
    write_node(tmp_path, 2, "", 0, 0)  # kept for slices of a card
    assert set(find_card_nodes(tmp_path, lambda: frozenset({1}))) == set(cards)
    assert find_card_nodes(tmp_path, lambda: frozenset({0})) == ()  # other drivers tell the node beside the card
    whole, less = (read_host_memory((), card_nodes=nodes) for nodes in ((), cards))
    assert whole.total_bytes - less.total_bytes == 2 * 2**22


@pytest.mark.parametrize("home", ["/etc/passwd", "/proc/1", "/proc/no/such"])
def test_the_cache_lies_in_tmp_where_home_cannot_be_used(monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    for name in ("AUTODS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", home)
    folder = cache_folder()
    assert folder == Path(f"/tmp/autods-cache-{os.getuid()}")
    assert folder.stat().st_mode & 0o077 == 0


def test_a_cache_that_another_user_may_write_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTODS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/etc/passwd")
    monkeypatch.setattr("os.getuid", lambda: 4_000_000_000)  # of nobody: what lies there is not theirs
    planted = Path("/tmp/autods-cache-4000000000")
    planted.mkdir(exist_ok=True)
    try:
        with pytest.raises(EnvironmentBroken, match="others may write it\n  set AUTODS_CACHE to a folder of your own"):
            cache_folder()
    finally:
        planted.rmdir()


def test_a_given_cache_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTODS_CACHE", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache"
    assert not cache_folder().exists()
