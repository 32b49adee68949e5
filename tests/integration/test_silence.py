"""Silent ranks are stuck at a limit; in a run's own code only where none of them is at work."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autods.rank.job import Beat, RankJob, RunOrder
from autods.runner import silence
from autods.runner.silence import RunningRank, Silence
from autods.types import PHASES, Phase, WorkloadSource
from tests.support.watching import wait_for

ROOT = Path(__file__).parents[2]
LIMIT_S = 0.3
# What ranks do, each with a stack when it is asked for it.
IDLE = "import time; ready(); time.sleep(60)"
COMPUTES = "ready()\nwhile True: sum(range(1000))"
READS = "import time; ready()\nwhile True: open('/dev/zero', 'rb').read(2**20); time.sleep(0.2)"
HAS_A_CHILD = "import subprocess, sys; ready(); subprocess.run([sys.executable, '-S', '-c', 'while True: pass'])"
# A thread of it is in state D, as one that waits for a file system: its child opens a pipe before the exec.
WAITS_FOR_A_DISK = """
import os, threading
os.mkfifo(__file__ + ".pipe")
opens = [(os.POSIX_SPAWN_OPEN, 0, __file__ + ".pipe", os.O_RDONLY, 0)]
ready()
waits = threading.Thread(target=os.posix_spawn, args=("/bin/true", ["true"], {}), kwargs={"file_actions": opens})
waits.start()
waits.join()
"""
DOWNLOADS = """
import socket
here, there = socket.socketpair()
ready()
socket.SocketIO(here, "rb").readinto(bytearray(1))
"""
IN_A_COLLECTIVE = """
code = compile("import time; ready(); time.sleep(60)", "/site-packages/torch/distributed/distributed_c10d.py", "exec")
exec(code)
"""


@pytest.fixture(autouse=True)
def _quick_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "_ANSWER_S", 0.4)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RunningRank]]:
    """A function that starts ranks which have been silent for ten seconds in a phase."""
    children: list[subprocess.Popen[bytes]] = []

    def start(code: str, phase: Phase = "script") -> RunningRank:
        number = len(children)
        script = tmp_path / f"train{number}.py"
        script.write_text(code)
        ready = tmp_path / f"ready{number}"
        begin = (
            f"import builtins, runpy, sys; sys.path.insert(0, {str(ROOT)!r}); from autods.system import stacks; "
            f"stacks.answer_requests(); builtins.ready = lambda: open({str(ready)!r}, 'w').close(); "
            f"runpy.run_path({str(script)!r})"
        )
        with (tmp_path / f"rank{number}.log").open("wb") as log:
            command = [sys.executable, "-S", "-c", begin]
            children.append(subprocess.Popen(command, stderr=log, start_new_session=True))
        wait_for(ready.exists, 20)
        return RunningRank(number, number, children[-1].pid, Beat(phase, 3, 0.0), time.monotonic() - 10)

    yield start
    for child in children:
        os.killpg(child.pid, 9)
        child.wait()


def make_job(folder: Path, *, is_run: bool = True, world_size: int = 1) -> RankJob:
    source = WorkloadSource(kind="file", path="/model.py", name="model", digest="")
    order = RunOrder(folder=str(folder), attempt=1, steps=None, checkpoint_every=9) if is_run else None
    return RankJob(
        job="run" if is_run else "train", source=source, device="cpu", folder=str(folder), scratch=str(folder),
        order=order, silence_s=dict.fromkeys(PHASES, LIMIT_S), world_size=world_size,
    )  # fmt: skip


def look(job: RankJob, *ranks: RunningRank, for_s: float = 1.2) -> float | None:
    """What is said of these ranks while somebody looks at them for some seconds."""
    watched, until = Silence(job), time.monotonic() + for_s
    while time.monotonic() < until:
        if (limit_s := watched.find_passed_limit(ranks, time.monotonic())) is not None:
            return limit_s
        time.sleep(0.05)
    return None


@pytest.mark.parametrize("code", [COMPUTES, READS, WAITS_FOR_A_DISK, HAS_A_CHILD, DOWNLOADS])
def test_a_rank_at_work_in_its_own_code_is_not_stuck(
    start: Callable[..., RunningRank], tmp_path: Path, code: str
) -> None:
    assert look(make_job(tmp_path), start(code)) is None


@pytest.mark.parametrize("code", [IDLE, IN_A_COLLECTIVE])
def test_a_rank_that_only_waits_is_stuck(start: Callable[..., RunningRank], tmp_path: Path, code: str) -> None:
    assert look(make_job(tmp_path), start(code)) == LIMIT_S


@pytest.mark.parametrize(("phase", "is_run"), [("forward", True), ("script", False)])
def test_elsewhere_the_limit_alone_decides(
    start: Callable[..., RunningRank], tmp_path: Path, phase: Phase, is_run: bool
) -> None:
    assert look(make_job(tmp_path, is_run=is_run), start(COMPUTES, phase), for_s=0.2) == LIMIT_S


def test_ranks_that_wait_for_one_at_work_are_not_stuck(start: Callable[..., RunningRank], tmp_path: Path) -> None:
    ranks = start(COMPUTES), start(IN_A_COLLECTIVE, "forward")
    assert look(make_job(tmp_path, world_size=2), *ranks) is None


def test_ranks_that_wait_for_another_node_have_more_time(
    start: Callable[..., RunningRank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, waiting = make_job(tmp_path, world_size=2), start(IN_A_COLLECTIVE, "forward")
    monkeypatch.setattr(silence, "MOST_LIMITS", 100)
    assert look(job, waiting) is None
    monkeypatch.setattr(silence, "MOST_LIMITS", 8)
    assert look(job, waiting) == LIMIT_S


def test_nodes_say_how_long_all_wait_for_other_ranks(
    start: Callable[..., RunningRank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver compares them: nodes that all wait do so for each other."""
    monkeypatch.setattr(silence, "_ASK_EVERY_S", 0.1)
    watched, rank = Silence(make_job(tmp_path, world_size=2)), start(IN_A_COLLECTIVE)

    def look_once() -> float:
        assert watched.find_passed_limit([rank], time.monotonic()) is None
        return watched.awaits_s

    wait_for(lambda: look_once() > 0.5, 20)
    rank.changed_s = time.monotonic()
    assert look_once() == 0.0


def test_work_that_ends_is_followed_by_a_limit(start: Callable[..., RunningRank], tmp_path: Path) -> None:
    code = "import time; ready(); end = time.monotonic() + 1\nwhile time.monotonic() < end: pass\ntime.sleep(60)"
    worker = start(code)
    began = time.monotonic()
    assert look(make_job(tmp_path), worker, for_s=20) == LIMIT_S
    assert time.monotonic() - began > 1.0
