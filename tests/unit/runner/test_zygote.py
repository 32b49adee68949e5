"""What a zygote does with the lines of its agent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from autods.rank.job import RankJob
from autods.rank.ops import ops_folder
from autods.runner.monitor import RankMonitor
from autods.runner.node_messages import NodeReport, StoreBound, StoreFailed, decode
from autods.runner.zygote import Zygote
from autods.system import processes
from tests.support.ends import JOB, report_of


def served(lines: bytes) -> list[bytes]:
    """What a zygote answers to these lines."""
    ours, peer = socket.socketpair()
    with ours, peer:
        ours.sendall(lines)
        ours.shutdown(socket.SHUT_WR)
        Zygote(peer, None, None, spawn=False).serve()
        peer.shutdown(socket.SHUT_WR)
        return ours.makefile("rb").read().splitlines()


def test_an_abort_that_comes_with_its_job_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[tuple[str, bool]] = []

    def run_job(zygote: Zygote, job: object, *, aborted: bool) -> NodeReport:
        jobs.append((getattr(job, "folder", ""), aborted))
        return report_of()

    monkeypatch.setattr(Zygote, "run_job", run_job)
    job = JOB.to_json().encode()
    (answer,) = served(b"abort\n" + job + b"\nabort\nabort\n")
    assert jobs == [(JOB.folder, True)]
    assert decode(answer) == report_of()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_store_is_bound_where_the_address_is_this_machines(address: str) -> None:
    bound, failed = map(decode, served(f"bind {address}\nbind 192.0.2.1\n".encode()))
    assert isinstance(bound, StoreBound), bound
    assert isinstance(failed, StoreFailed)
    assert "192.0.2.1" in failed.reason


def test_spawned_ranks_read_their_job_in_their_nodes_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes see the log folder, and each has another job. The scratch folder is each node's own."""
    job = replace(JOB, folder=str(tmp_path / "logs"), scratch=str(tmp_path / "scratch"), local_ranks=(0,))
    jobs = tmp_path / "jobs"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    Path(sys.executable).write_text(f'#!/bin/sh\necho "$@" > {jobs}\ncat "$7" >> {jobs}\n')
    Path(sys.executable).chmod(0o700)
    ours, peer = socket.socketpair()
    with ours, peer:
        Zygote(peer, None, None, spawn=True).run_job(job, aborted=False)
    words, text = jobs.read_text().split("\n", 1)
    assert words.startswith("-P -m autods.rank.worker 0 ")
    assert words.endswith(f" {job.scratch}/job.json")
    assert RankJob.from_json(text) == job
    assert not Path(job.scratch).exists()


@pytest.mark.parametrize("kind", ["survey", "train", "run"])
def test_no_job_waits_for_the_lock_of_a_killed_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Literal["survey", "train", "run"]
) -> None:
    """A script that builds an op by itself would wait for ever, in a run as in a trial."""
    monkeypatch.setenv("AUTODS_CACHE", str(tmp_path / "cache"))
    lock = ops_folder() / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    job = replace(
        JOB, job=kind, folder=str(tmp_path / "logs"), scratch=str(tmp_path / "scratch"), local_ranks=(0,), world_size=1
    )
    monkeypatch.setattr(sys, "executable", "/bin/false")
    ours, peer = socket.socketpair()
    with ours, peer:
        Zygote(peer, None, None, spawn=True).run_job(job, aborted=False)
    assert not lock.exists()


def test_a_job_ends_although_a_rank_cannot_be_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in state D waits for a device, and no signal reaches it."""
    job = replace(JOB, folder=str(tmp_path / "logs"), scratch=str(tmp_path / "scratch"), local_ranks=(0,), end_s=0.1)
    ours, peer = socket.socketpair()
    with ours, peer, subprocess.Popen(["/bin/sleep", "60"]) as rank, monkeypatch.context() as patched:
        patched.setattr(processes, "fork_watched", lambda: (rank.pid, os.pidfd_open(rank.pid), -1))
        patched.setattr(processes, "list_children", lambda: [rank.pid])
        for name in ("kill", "killpg"):
            patched.setattr(os, name, lambda pid, number: None)
        report = Zygote(peer, None, None, spawn=False).run_job(job, aborted=True)
        patched.undo()
        rank.send_signal(signal.SIGKILL)
    assert f"process {rank.pid} (sleep) in state S" in report.survivors
    assert [rank.killed_by_us for rank in report.ranks] == [True]
    assert not report.succeeded


def test_an_abort_wakes_the_watch_over_ranks_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read after the job. Until then a rank that does not end would be looked at without end."""
    job = replace(JOB, folder=str(tmp_path / "logs"), scratch=str(tmp_path / "scratch"), local_ranks=(0,), end_s=0.3)
    looks = list[float]()
    look = RankMonitor.check
    ours, peer = socket.socketpair()
    with ours, peer, subprocess.Popen(["/bin/sleep", "60"]) as rank, monkeypatch.context() as patched:
        patched.setattr(RankMonitor, "check", lambda monitor, began: (looks.append(began), look(monitor, began)))
        patched.setattr(processes, "fork_watched", lambda: (rank.pid, os.pidfd_open(rank.pid), -1))
        patched.setattr(processes, "list_children", lambda: [rank.pid])
        for name in ("kill", "killpg"):
            patched.setattr(os, name, lambda pid, number: None)
        ours.sendall(b"abort\n")
        report = Zygote(peer, None, None, spawn=False).run_job(job, aborted=False)
        patched.undo()
        rank.send_signal(signal.SIGKILL)
    assert report.killed_because == "aborted"
    assert len(looks) < 60


def test_ranks_that_are_given_up_count_as_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the driver has seen that all nodes wait for each other."""
    job = replace(JOB, folder=str(tmp_path / "logs"), scratch=str(tmp_path / "scratch"), local_ranks=(0,), end_s=5.0)
    ours, peer = socket.socketpair()
    with ours, peer, subprocess.Popen(["/bin/sleep", "60"], start_new_session=True) as rank:
        monkeypatch.setattr(processes, "fork_watched", lambda: (rank.pid, os.pidfd_open(rank.pid), -1))
        ours.sendall(b"give up\nabort\n")
        report = Zygote(peer, None, None, spawn=False).run_job(job, aborted=False)
    assert report.killed_because == "stuck"
    assert "stuck" in [end.lost for end in report.ranks]
