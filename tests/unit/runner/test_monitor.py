"""How long a rank may be silent, what is reported of its end, and whether GPUs are free again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autods.devices import CPU
from autods.rank.job import Beat, Heartbeats, RankJob
from autods.runner.monitor import RankMonitor, RunningRank, check_freed, read_tiers
from autods.system import processes
from autods.types import PHASES, Phase, WorkloadSource
from tests.support.watching import wait_for

GIB = 2**30


@pytest.fixture
def pid() -> Iterator[int]:
    """A process that stands in for a rank."""
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True) as child:
        yield child.pid
        child.kill()


def silent(phase: Phase, folder: Path, pid: int) -> RankMonitor:
    """A rank whose last heartbeat in this phase is ten seconds old; in a forward, one second is too long."""
    source = WorkloadSource(kind="file", path="/model.py", name="model", digest="")
    job = RankJob(
        job="train", source=source, device="cpu", folder=str(folder), scratch=str(folder), end_s=0.2,
        silence_s={**dict.fromkeys(PHASES, 1.0), "save": 60.0},
    )  # fmt: skip
    board = Heartbeats.create(1)
    board.beat(0, phase, 3)
    long_ago = time.monotonic() - 10.0
    rank = RunningRank(0, 0, pid, Beat(phase, 3, board.read(0).at_s), long_ago)
    return RankMonitor(job, board, {os.pidfd_open(pid): rank})


@pytest.mark.parametrize(("phase", "because"), [("save", None), ("forward", "stuck")])
def test_how_long_a_rank_may_be_silent_depends_on_its_phase(
    tmp_path: Path, pid: int, phase: Phase, because: str | None
) -> None:
    monitor = silent(phase, tmp_path, pid)
    monitor.check(time.monotonic())
    assert monitor.killed_because == because
    assert [(rank.lost, rank.lost_after_s) for rank in monitor.exits] == [("stuck", 1.0)] * bool(because)


def test_the_time_of_a_suspended_job_does_not_count(tmp_path: Path, pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its processes are stopped for an hour, and this one goes on before the rank."""
    monitor = silent("save", tmp_path, pid)
    began, hour_s = time.monotonic(), 3600.0
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: processes.is_stopped(pid), 10)
    monitor.check(began)
    monkeypatch.setattr(time, "monotonic", lambda: began + hour_s)
    monitor.check(began)
    assert monitor.killed_s is None
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: not processes.is_stopped(pid), 10)
    monkeypatch.setattr(time, "monotonic", lambda: began + hour_s + 2)
    monitor.check(began)
    assert monitor.killed_s is None


def test_a_rank_whose_compiler_runs_is_not_stuck(tmp_path: Path) -> None:
    """It builds an op or a kernel: `ninja` is a child of the rank, in its session."""
    ninja = tmp_path / "ninja"
    ninja.symlink_to("/bin/sleep")
    with subprocess.Popen(["/bin/sh", "-c", f"{ninja} 60; true"], start_new_session=True) as rank:
        try:
            wait_for(lambda: processes.is_compiling(rank.pid), 10)
            monitor = silent("forward", tmp_path, rank.pid)
            monitor.check(time.monotonic())
            assert monitor.killed_s is None
        finally:
            os.killpg(rank.pid, signal.SIGKILL)
    wait_for(lambda: not processes.is_compiling(rank.pid), 10)


def test_a_rank_that_sigkill_does_not_end_is_abandoned(
    tmp_path: Path, pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process in state D waits for a device, and no signal reaches it."""
    monitor = silent("forward", tmp_path, pid)
    with monkeypatch.context() as patched:
        for name in ("kill", "killpg"):
            patched.setattr(os, name, lambda pid, number: None)
        monitor.kill("aborted")
        assert not monitor.is_overdue()
        wait_for(monitor.is_overdue, 10)
    monitor.abandon()
    assert monitor.running == {}
    assert [(rank.killed_by_us, rank.exit_code) for rank in monitor.exits] == [(True, None)]


def test_a_stuck_rank_writes_its_stack_before_it_is_killed(
    tmp_path: Path, pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter((True, True, False))

    def is_handling_signal(pid: int, number: signal.Signals) -> bool:
        still = next(looks)
        if not still:
            (tmp_path / "rank0.log").write_text("its stack\n")
        return still

    monkeypatch.setattr(processes, "is_handling_signal", is_handling_signal)
    monitor = silent("forward", tmp_path, pid)
    monitor.check(time.monotonic())
    assert [rank.log_tail for rank in monitor.exits] == ["its stack\n"]


@pytest.mark.parametrize(("error", "tail"), [({"types": ["ValueError"], "message": "no"}, ""), (None, "last words\n")])
def test_the_log_is_reported_where_no_exception_is(
    tmp_path: Path, pid: int, error: dict[str, object] | None, tail: str
) -> None:
    monitor = silent("step", tmp_path, pid)
    (tmp_path / "rank0.log").write_text("last words\n")
    if error is not None:
        record = {"ok": False, "error": error, "phase": "step", "step": 3, "at_s": 1.0, "a key of a later release": 3}
        (tmp_path / "rank0.json").write_text(json.dumps(record))
    os.kill(pid, signal.SIGKILL)
    monitor.collect_exit(next(iter(monitor.running)))
    assert [rank.log_tail for rank in monitor.exits] == [tail]


def readings(*held: tuple[int, ...] | None) -> Callable[[], tuple[int, ...] | None]:
    """One after the other, then the last for ever."""
    left = list(held)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


@pytest.mark.parametrize(
    ("later", "sleeps"), [([(3 * GIB + 2**20,)], 0), ([(4 * GIB,), (4 * GIB,), (3 * GIB,)], 2)], ids=["now", "soon"]
)
def test_a_gpu_that_is_freed_in_time_is_not_reported(later: list[tuple[int, ...]], sleeps: int) -> None:
    slept: list[float] = []
    assert check_freed((3 * GIB,), readings(*later), slept.append) == []
    assert len(slept) == sleeps


def test_a_gpu_that_is_not_freed_is_reported_with_its_bytes() -> None:
    slept: list[float] = []
    (text,) = check_freed((0, 0), readings((0, 5 * GIB)), slept.append)
    assert text.startswith("GPU 1 still holds 5.0 GiB more than before this trial")
    assert 2.5 < sum(slept) < 3.5


@pytest.mark.parametrize(
    ("before", "now"), [((0,), (0, 5 * GIB)), ((), None), ((0,), None)], ids=["unused GPU", "no NVML", "NVML gone"]
)
def test_nothing_is_reported_that_no_rank_or_nvml_shows(before: tuple[int, ...], now: tuple[int, ...] | None) -> None:
    assert check_freed(before, readings(now), lambda seconds: None) == []


def test_cpu_ranks_have_no_gpu_to_read() -> None:
    assert CPU.read_used_bytes() is None


def test_tiers_are_memory_and_the_disk_that_swap_files_will_lie_on(tmp_path: Path) -> None:
    tiers = {use.tier: use for use in read_tiers((), str(tmp_path / "not" / "yet"))}
    assert {"host", "nvme"} <= set(tiers) <= {"host", "shm", "nvme"}
    assert all(0 < use.used_bytes <= use.total_bytes or use.tier == "shm" for use in tiers.values())
    assert tiers["nvme"].total_bytes == shutil.disk_usage(tmp_path).total
    assert "nvme" not in {use.tier for use in read_tiers((), None)}
