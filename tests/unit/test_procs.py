"""A process that is busy ends with the peer that it works for."""

import os
import select
import socket
import subprocess
import sys

import pytest

from autods import procs

WORKER = """
import socket, sys, time
from autods import procs

peer = socket.socket(fileno=int(sys.argv[1]))
with procs.ends_with(peer):
    peer.sendall(b"busy")
    time.sleep(0 if "quick" in sys.argv else 60)
peer.sendall(b"done")
time.sleep(0.3)
sys.exit(5)
"""


def worker(theirs: socket.socket, *words: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", WORKER, str(theirs.fileno()), *words]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    return process


def test_a_busy_process_dies_when_its_peer_hangs_up() -> None:
    ours, theirs = socket.socketpair()
    process = worker(theirs)
    assert ours.recv(4) == b"busy"
    ours.close()
    assert process.wait(30) < 0  # by a signal


def test_a_peer_that_hung_up_before_is_noticed_too() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    assert worker(theirs).wait(30) == 97


def test_a_process_that_has_done_its_work_outlives_its_peer() -> None:
    ours, theirs = socket.socketpair()
    process = worker(theirs, "quick")
    assert ours.recv(8, socket.MSG_WAITALL) == b"busydone"
    ours.close()
    assert process.wait(30) == 5


@pytest.mark.parametrize("pidfd", [True, False])
def test_the_end_of_a_forked_child_is_seen_with_and_without_descriptors_of_processes(
    monkeypatch: pytest.MonkeyPatch, pidfd: bool
) -> None:
    if not pidfd:
        monkeypatch.setattr(procs, "has_pidfd", lambda: False)
    waits, goes = os.pipe()
    pid, ending, kept = procs.watched_fork()
    if pid == 0:
        os.close(goes)
        os.read(waits, 1)  # until the parent lets go
        os._exit(0)
    assert kept == -1
    poll = select.poll()
    poll.register(ending, select.POLLIN)
    assert poll.poll(0) == []
    os.close(goes)
    assert [fd for fd, _ in poll.poll()] == [ending]
    assert os.waitpid(pid, 0)[1] == 0
    os.close(ending)
    os.close(waits)


def test_a_rank_is_taken_by_the_oom_killer_before_what_watches_it() -> None:
    """Ray's workers have the worst score there is: a rank has to have it, too, for then the larger one goes."""
    code = "from autods import procs; procs.first_to_be_killed(); print(open('/proc/self/oom_score_adj').read())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(said) == 1000
