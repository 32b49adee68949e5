"""The clock of a wait: its limit, its reports, and what does not count."""

from __future__ import annotations

import os

import pytest

from autods.system import waiting
from autods.system.processes import count_moved_bytes
from autods.system.waiting import Loading, Wait


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as a list of one."""
    time = [100.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: time[0])
    return time


def test_a_wait_is_reported_after_some_seconds_and_again(now: list[float]) -> None:
    reports: list[float] = []
    wait = Wait(200.0, reports.append)
    while not wait.is_over():
        now[0] += 1.0
    assert reports == [20.0, 80.0, 140.0]


def test_the_time_in_which_we_were_stopped_does_not_count(now: list[float]) -> None:
    wait = Wait(60.0)
    now[0] += 3600.0
    assert not wait.is_over()


def test_an_import_that_moves_bytes_is_no_hang(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    moved = [0]
    monkeypatch.setattr(waiting.processes, "count_moved_bytes", lambda pid: moved[0])
    loading, passed_s = Loading.of(1, 30.0), 0
    while not loading.is_over():
        now[0] += 1.0
        passed_s += 1
        moved[0] += 4 * 2**20 if passed_s <= 100 else 0
    assert 125 <= passed_s <= 131


def test_an_import_that_reads_for_ever_ends_too(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting.processes, "count_moved_bytes", lambda pid: int(now[0]) * 2**30)
    loading = Loading.of(1, 30.0)
    while not loading.is_over():
        now[0] += 1.0
    assert now[0] == 100.0 + 8 * 30.0


def test_the_bytes_that_a_process_moved_are_counted() -> None:
    before = count_moved_bytes(os.getpid())
    with open("/dev/zero", "rb", buffering=0) as zeros:
        zeros.read(2**20)
    assert count_moved_bytes(os.getpid()) - before >= 2**20
