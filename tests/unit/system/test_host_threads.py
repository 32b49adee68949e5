"""How many processor threads a rank gets."""

from __future__ import annotations

import os

import psutil
import pytest

from autods.system import host
from autods.system.host import count_cores, requested_threads, threads_per_rank


@pytest.fixture(autouse=True)
def a_node_of_eight(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 8)
    monkeypatch.setattr(host, "read_cpu_quota", lambda: None)


def test_ranks_share_the_processors_of_their_node():
    assert [threads_per_rank(ranks, count_cores()) for ranks in (1, 2, 3, 8)] == [8, 4, 2, 1]


def test_a_rank_has_at_least_one_thread():
    assert threads_per_rank(20, 8) == 1


def test_processors_that_share_a_core_count_once(monkeypatch):
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 4)
    assert count_cores() == 4


@pytest.mark.parametrize(("quota", "cores"), [(2.0, 2), (3.9, 3), (0.5, 1), (64.0, 8)])
def test_a_cpu_quota_leaves_fewer_cores_than_are_seen(monkeypatch, quota, cores):
    monkeypatch.setattr(host, "read_cpu_quota", lambda: quota)
    assert count_cores() == cores


@pytest.mark.parametrize(("said", "threads"), [("4", 4), ("4,2", 4), ("", None), ("0", None), ("many", None)])
def test_omp_num_threads_is_taken_as_openmp_takes_it(monkeypatch, said, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert requested_threads() == threads
