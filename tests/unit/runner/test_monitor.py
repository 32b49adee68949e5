"""How long a rank may be silent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autods.runner.monitor import HostWatch, Live, RankWatch
from autods.system import processes
from autods.trial.job import RankJob
from autods.trial.progress import Beat, Heartbeats
from autods.types import Phase, WorkloadSource


@pytest.fixture
def pid() -> Iterator[int]:
    """Of a process that stands in for a rank."""
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True) as child:
        yield child.pid
        child.kill()


def silent(phase: Phase, folder: Path, pid: int) -> RankWatch:
    """A rank that said for ten seconds nothing more than that it is in this phase; the stall limit is one second."""
    source = WorkloadSource(kind="file", path="/model.py", name="model", digest="")
    job = RankJob(
        job="train", source=source, device="cpu", folder=str(folder), scratch=str(folder), stall_s=1.0, init_s=60.0
    )
    board = Heartbeats.of(1)
    board.beat(0, phase, 3)
    long_ago = time.monotonic() - 10.0
    live = Live(0, 0, pid, Beat(phase, 3, board.read(0).at_s), long_ago)
    return RankWatch(job, board, {os.pidfd_open(pid): live}, HostWatch.begin())


@pytest.mark.parametrize("phase", ["save", "load"])
def test_a_rank_that_writes_a_checkpoint_may_be_silent_for_long(tmp_path: Path, pid: int, phase: Phase) -> None:
    watch = silent(phase, tmp_path, pid)
    watch.look(time.monotonic())
    assert watch.killed_s is None


@pytest.mark.parametrize("phase", ["forward", "evaluate"])
def test_a_rank_that_computes_may_not(tmp_path: Path, pid: int, phase: Phase) -> None:
    watch = silent(phase, tmp_path, pid)
    watch.look(time.monotonic())
    assert watch.why_killed == "stuck"


def test_a_stuck_rank_is_not_ended_before_it_has_said_where_it_is(
    tmp_path: Path, pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter((True, True, False))

    def taking(pid: int, number: signal.Signals) -> bool:
        still = next(looks)
        if not still:
            (tmp_path / "rank0.log").write_text("its stack\n")
        return still

    monkeypatch.setattr(processes, "is_handling_signal", taking)
    watch = silent("forward", tmp_path, pid)
    watch.look(time.monotonic())
    assert [end["log_tail"] for end in watch.ends] == ["its stack\n"]


@pytest.mark.parametrize(("said", "tail"), [({"types": ["ValueError"], "message": "no"}, ""), (None, "last words\n")])
def test_the_log_of_a_rank_is_reported_where_its_exception_is_not(
    tmp_path: Path, pid: int, said: dict[str, object] | None, tail: str
) -> None:
    watch = silent("step", tmp_path, pid)
    (tmp_path / "rank0.log").write_text("last words\n")
    if said is not None:
        (tmp_path / "rank0.json").write_text(json.dumps({"ok": False, "error": said, "at_s": 1.0}))
    os.kill(pid, signal.SIGKILL)
    watch.ended(next(iter(watch.live)))
    assert [end["log_tail"] for end in watch.ends] == [tail]
