"""How many processor threads a rank gets."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from autods.system import host
from autods.system.host import count_cores, read_numa_cores, requested_threads, share_cores, threads_per_rank


@pytest.fixture(autouse=True)
def a_node_of_eight(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 8)
    monkeypatch.setattr(host, "read_cpu_quota", lambda: None)


NO_SYSFS = Path("/no/such/folder")


def test_ranks_share_the_processors_of_their_node():
    assert [threads_per_rank(ranks, count_cores(NO_SYSFS)) for ranks in (1, 2, 3, 8)] == [8, 4, 2, 1]


def test_a_rank_has_at_least_one_thread():
    assert threads_per_rank(20, 8) == 1


def test_processors_that_share_a_core_count_once(monkeypatch):
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 4)
    assert count_cores(NO_SYSFS) == 4


@pytest.mark.parametrize(("quota", "cores"), [(2.0, 2), (3.9, 3), (0.5, 1), (64.0, 8)])
def test_a_cpu_quota_leaves_fewer_cores_than_are_seen(monkeypatch, quota, cores):
    monkeypatch.setattr(host, "read_cpu_quota", lambda: quota)
    assert count_cores(NO_SYSFS) == cores


@pytest.mark.parametrize(("said", "threads"), [("4", 4), ("4,2", 4), ("", None), ("0", None), ("many", None)])
def test_omp_num_threads_is_taken_as_openmp_takes_it(monkeypatch, said, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert requested_threads() == threads


def write_sysfs(folder, nodes, siblings):
    """Write a machine as /sys shows it: the processors of each node, and those of each core."""
    for number, cpus in nodes.items():
        (folder / f"node/node{number}").mkdir(parents=True)
        (folder / f"node/node{number}/cpulist").write_text(f"{cpus}\n")
    for core in siblings:
        for cpu in core:
            (folder / f"cpu/cpu{cpu}/topology").mkdir(parents=True)
            (folder / f"cpu/cpu{cpu}/topology/thread_siblings_list").write_text(",".join(map(str, core)) + "\n")


def test_cores_of_numa_nodes_are_read_with_their_hyper_threads(tmp_path):
    write_sysfs(tmp_path, {0: "0-1,4-5", 1: "2-3,6-7,8", 2: ""}, [(0, 4), (1, 5), (2, 6), (3, 7), (8,)])
    assert read_numa_cores(tmp_path) == {0: [(0, 4), (1, 5)], 1: [(2, 6), (3, 7)]}  # processor 8 may not be used


def test_both_threads_of_a_part_of_the_cores_count_once(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 64)  # of the machine; a job has four of them
    write_sysfs(tmp_path, {}, [(cpu, cpu + 4) for cpu in range(4)])
    assert count_cores(tmp_path) == 4


def test_a_cpu_quota_leaves_no_cores_to_bind_to(tmp_path, monkeypatch):
    write_sysfs(tmp_path, {0: "0-3", 1: "4-7"}, [(cpu,) for cpu in range(8)])
    monkeypatch.setattr(host, "read_cpu_quota", lambda: 7.5)
    assert read_numa_cores(tmp_path) == {}


SOCKETS = {0: [(0, 8), (1, 9), (2, 10), (3, 11)], 1: [(4, 12), (5, 13), (6, 14), (7, 15)]}


@pytest.mark.parametrize(
    ("cards", "shares"),
    [
        ((0, 1), ((0, 8, 1, 9, 2, 10, 3, 11), (4, 12, 5, 13, 6, 14, 7, 15))),
        ((1, 0), ((4, 12, 5, 13, 6, 14, 7, 15), (0, 8, 1, 9, 2, 10, 3, 11))),
        ((1, 0, 1, 0), ((4, 12, 5, 13), (0, 8, 1, 9), (6, 14, 7, 15), (2, 10, 3, 11))),
        ((0, 0), ((0, 8, 1, 9, 2, 10, 3, 11), (4, 12, 5, 13, 6, 14, 7, 15))),  # no rank loses cores
        ((None, None), ((0, 8, 1, 9, 2, 10, 3, 11), (4, 12, 5, 13, 6, 14, 7, 15))),
    ],
)
def test_each_rank_gets_its_share_of_cores_near_its_card(cards, shares):
    assert share_cores(SOCKETS, cards) == shares


@pytest.mark.parametrize(
    ("nodes", "cards"), [({0: SOCKETS[0]}, (0, 0)), (SOCKETS, (0,)), (SOCKETS, (0,) * 9), ({}, (0, 0))]
)
def test_no_rank_is_bound_where_that_gains_nothing(nodes, cards):
    assert share_cores(nodes, cards) == ()
