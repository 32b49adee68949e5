"""How long a rank may be silent, what is reported of its end, and whether GPUs are free again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autods.runner.monitor import GpuMonitor, RankMonitor, RunningRank
from autods.system import processes
from autods.trial.job import Beat, Heartbeats, RankJob
from autods.types import Phase, WorkloadSource

GIB = 2**30


@pytest.fixture
def pid() -> Iterator[int]:
    """A process that stands in for a rank."""
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True) as child:
        yield child.pid
        child.kill()


def silent(phase: Phase, folder: Path, pid: int) -> RankMonitor:
    """A rank whose last heartbeat in this phase is ten seconds old; the stall limit is one second."""
    source = WorkloadSource(kind="file", path="/model.py", name="model", digest="")
    job = RankJob(
        job="train", source=source, device="cpu", folder=str(folder), scratch=str(folder), stall_s=1.0, init_s=60.0
    )
    board = Heartbeats.create(1)
    board.beat(0, phase, 3)
    long_ago = time.monotonic() - 10.0
    rank = RunningRank(0, 0, pid, Beat(phase, 3, board.read(0).at_s), long_ago)
    return RankMonitor(job, board, {os.pidfd_open(pid): rank})


@pytest.mark.parametrize("phase", ["save", "load"])
def test_a_rank_that_writes_a_checkpoint_may_be_silent(tmp_path: Path, pid: int, phase: Phase) -> None:
    monitor = silent(phase, tmp_path, pid)
    monitor.check(time.monotonic())
    assert monitor.killed_s is None


@pytest.mark.parametrize("phase", ["forward", "evaluate"])
def test_a_rank_that_computes_may_not_be_silent(tmp_path: Path, pid: int, phase: Phase) -> None:
    monitor = silent(phase, tmp_path, pid)
    monitor.check(time.monotonic())
    assert monitor.killed_because == "stuck"


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
    monitor = GpuMonitor.begin("cuda", 1, readings((3 * GIB,), *later))
    assert monitor.check_freed(slept.append) == []
    assert len(slept) == sleeps


def test_a_gpu_that_is_not_freed_is_reported_with_its_bytes() -> None:
    slept: list[float] = []
    (text,) = GpuMonitor.begin("cuda", 2, readings((0, 0), (0, 5 * GIB))).check_freed(slept.append)
    assert text.startswith("GPU 1 still holds 5.0 GiB more than before this trial")
    assert 2.5 < sum(slept) < 3.5


@pytest.mark.parametrize(
    "held", [[(0, 0), (0, 5 * GIB)], [None], [(0,), None]], ids=["unused GPU", "no NVML", "NVML gone"]
)
def test_nothing_is_reported_that_no_rank_or_nvml_shows(held: list[tuple[int, ...] | None]) -> None:
    assert GpuMonitor.begin("cuda", 1, readings(*held)).check_freed(lambda seconds: None) == []


def test_cpu_ranks_have_no_gpu_to_read() -> None:
    def never() -> tuple[int, ...]:
        raise AssertionError("read")

    assert GpuMonitor.begin("cpu", 2, never).check_freed() == []
