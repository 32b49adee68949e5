"""The agent of a node: its zygote, the jobs that it passes on, and what it knows of its machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autods.runner.agent import NodeAgent, ZygoteProcess, digest_file
from autods.runner.protocol import Heartbeat, Ready, encode
from tests.support.ends import JOB, report_of

# A process that greets as a zygote does, and ends when the other end hangs up.
WAITS = f"""
import socket, sys
connection = socket.socket(fileno=int(sys.argv[1]))
connection.sendall({encode(Ready(pid=1))!r})
connection.recv(1)
sys.exit(3)
"""


@pytest.fixture
def zygote() -> Iterator[ZygoteProcess]:
    connection, peer = socket.socketpair()
    with peer:
        process = subprocess.Popen([sys.executable, "-c", WAITS, str(peer.fileno())], pass_fds=[peer.fileno()])
    yield ZygoteProcess(process=process, connection=connection)
    process.kill()
    process.wait()


def an_agent() -> NodeAgent:
    return NodeAgent(JOB.source, "cpu", 1, "another machine", "log", {})


def test_a_zygote_ends_when_its_agent_closes_the_connection(zygote: ZygoteProcess) -> None:
    assert zygote.receive() == Ready(pid=1)
    assert zygote.close() == 3


def test_a_zygote_that_was_killed_sends_nothing_more(zygote: ZygoteProcess) -> None:
    assert zygote.receive() == Ready(pid=1)
    os.kill(zygote.process.pid, signal.SIGKILL)
    assert zygote.receive() is None
    zygote.send(b"a job that nobody hears")
    assert zygote.close() == -signal.SIGKILL


def test_an_abort_of_one_job_never_meets_the_next() -> None:
    """It comes when that job has ended by itself: the zygote does not even hear it."""
    connection, peer = socket.socketpair()
    node = an_agent()
    process: Any = None
    node.zygote = ZygoteProcess(process=process, connection=connection)
    report = report_of()
    peer.sendall(encode(Heartbeat(phase="forward", step=1)) + encode(report))
    assert node.run(JOB, 1) == report
    node.abort(1)
    peer.sendall(encode(report))
    node.run(JOB, 2)
    assert peer.recv(1 << 16).count(b"abort") == 0
    for end in (connection, peer):
        end.close()


def test_a_file_counts_as_seen_only_if_it_is_the_same(tmp_path: Path) -> None:
    here = tmp_path / "model.py"
    here.write_text("one")
    same, folder = digest_file(str(here)), str(tmp_path)
    assert same is not None
    node, gone = an_agent(), str(tmp_path / "gone")
    assert node.find_missing({str(here): same}, [folder]) == []
    assert node.find_missing({str(here): "of another text"}, [folder]) == [str(here)]
    assert node.find_missing({gone: same}, [folder, "/nowhere"]) == [gone, "/nowhere"]
