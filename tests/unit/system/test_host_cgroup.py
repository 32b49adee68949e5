"""Memory cgroups, read from trees of files as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from autods.system.host import MemoryGroup, find_memory_groups, machine_oom_kills

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
