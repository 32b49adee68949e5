"""Memory cgroups, read from trees of files as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from autods.system.host import MemoryGroup, find_memory_groups, machine_oom_kills, read_cpu_quota

GIB = 2**30


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_cgroup_v2_has_limit_free_bytes_and_oom_kills(tmp_path):
    folder = write(
        tmp_path,
        memory__max=f"{4 * GIB}\n",
        memory__current=f"{3 * GIB}\n",
        memory__stat=f"anon 5\ninactive_file {GIB}\n",
        memory__events="low 0\nmax 7\noom 2\noom_kill 2\noom_group_kill 0\n",
    )
    group = MemoryGroup(folder=folder, version=2)
    assert (group.limit_bytes(), group.free_bytes(), group.oom_kills()) == (4 * GIB, 2 * GIB, 2)


def test_what_makes_processes_wait_is_a_limit_too(tmp_path):
    folder = write(tmp_path, memory__max="max\n", memory__high=f"{4 * GIB}\n", memory__current=f"{GIB}\n")
    group = MemoryGroup(folder=folder, version=2)
    assert (group.limit_bytes(), group.free_bytes()) == (4 * GIB, 3 * GIB)


def test_version_1_says_the_same_under_other_names(tmp_path):
    folder = write(
        tmp_path,
        memory__limit_in_bytes=f"{4 * GIB}",
        memory__usage_in_bytes=f"{3 * GIB}",
        memory__stat="total_inactive_file 0\n",
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
    )
    group = MemoryGroup(folder=folder, version=1)
    assert (group.limit_bytes(), group.free_bytes(), group.oom_kills()) == (4 * GIB, GIB, 5)


@pytest.mark.parametrize(
    ("version", "limit", "used", "stat"),
    [
        (1, "memory__limit_in_bytes", "memory__usage_in_bytes", "total_active_file"),
        (2, "memory__max", "memory__current", "active_file"),
        (2, "memory__max", "memory__current", "slab_reclaimable"),
    ],
)
def test_a_cache_that_the_kernel_drops_is_free(tmp_path, version, limit, used, stat):
    texts = {limit: str(4 * GIB), used: str(3 * GIB), "memory__stat": f"inactive_anon 5\n{stat} {2 * GIB}\n"}
    group = MemoryGroup(folder=write(tmp_path, **texts), version=version)
    assert group.free_bytes() == 3 * GIB


@pytest.mark.parametrize(
    ("version", "name", "text"), [(2, "memory__max", "max"), (1, "memory__limit_in_bytes", str(2**63 - 4096))]
)
def test_no_limit_is_none(tmp_path, version, name, text):
    group = MemoryGroup(folder=write(tmp_path, **{name: text}), version=version)
    assert group.limit_bytes() is None
    assert group.free_bytes() is None


def test_a_folder_without_the_files_answers_none(tmp_path):
    group = MemoryGroup(folder=tmp_path, version=2)
    assert (group.limit_bytes(), group.free_bytes(), group.oom_kills()) == (None, None, None)


def test_the_groups_above_limit_too(tmp_path):
    inner = write(tmp_path / "cg" / "pod" / "box", memory__max="max")
    write(tmp_path / "cg" / "pod", memory__max=str(GIB))
    proc = tmp_path / "cgroup"
    proc.write_text("0::/pod/box\n")
    groups = find_memory_groups(proc, tmp_path / "cg")
    assert [group.folder for group in groups] == [inner, inner.parent]
    assert [group.limit_bytes() for group in groups] == [None, GIB]


def test_this_kernel_counts_its_kills():
    kills = machine_oom_kills()
    assert kills is None or kills >= 0
    assert all(group.limit_bytes() is None or group.limit_bytes() > 0 for group in find_memory_groups())


@pytest.mark.parametrize(
    ("inner", "outer", "processors"), [("max", "250000", 2.5), ("50000", "max", 0.5), ("max", "max", None)]
)
def test_the_smallest_cpu_quota_of_all_groups_counts(tmp_path, inner, outer, processors):
    write(tmp_path / "cg" / "pod" / "box", cpu__max=f"{inner} 100000\n")
    write(tmp_path / "cg" / "pod", cpu__max=f"{outer} 100000\n")
    (tmp_path / "cgroup").write_text("0::/pod/box\n")
    assert read_cpu_quota(tmp_path / "cgroup", tmp_path / "cg") == processors


def test_a_group_without_a_quota_file_has_the_one_above_it(tmp_path):
    """The controller is enabled for the outer group alone."""
    write(tmp_path / "cg" / "pod", cpu__max="200000 100000\n")
    (tmp_path / "cg" / "pod" / "box").mkdir()
    (tmp_path / "cgroup").write_text("0::/pod/box\n")
    assert read_cpu_quota(tmp_path / "cgroup", tmp_path / "cg") == 2


@pytest.mark.parametrize(("quota", "processors"), [("150000", 1.5), ("-1", None)])
def test_version_1_has_quota_and_period_in_two_files(tmp_path, quota, processors):
    write(tmp_path / "cg" / "cpu" / "box", cpu__cfs_quota_us=f"{quota}\n", cpu__cfs_period_us="100000\n")
    (tmp_path / "cgroup").write_text("4:cpu,cpuacct:/box\n3:memory:/box\n0::/box\n")
    assert read_cpu_quota(tmp_path / "cgroup", tmp_path / "cg") == processors
