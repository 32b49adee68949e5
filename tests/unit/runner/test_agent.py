"""A zygote that is handed from the process that started it to the one that uses it; here a process that only waits."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from autods.runner import zygote as zygotes
from autods.runner.agent import Offer, Zygote, take

# As the keeper and the zygote in one: greets, ends when the other end hangs up, and says its exit code.
WAITS = """
import socket, sys
status, connection = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:])
connection.sendall(b"ready")
connection.recv(1)
status.sendall(b"3")
"""


@pytest.fixture
def started() -> Iterator[tuple[Zygote, subprocess.Popen[bytes]]]:
    (connection, its_connection), (status, its_status) = socket.socketpair(), socket.socketpair()
    fds = [its_status.fileno(), its_connection.fileno()]
    process = subprocess.Popen([sys.executable, "-c", WAITS, *map(str, fds)], pass_fds=fds)
    its_connection.close()
    its_status.close()
    yield Zygote(keeper=process.pid, connection=connection, status=status), process
    process.kill()
    process.wait()


def test_who_takes_the_zygote_speaks_with_it_and_hears_how_it_ended(
    started: tuple[Zygote, subprocess.Popen[bytes]],
) -> None:
    with Offer(*started) as offer:
        zygote = take(offer.name)
        assert zygote.connection.recv(5) == b"ready"
        assert zygote.keeper == started[1].pid
        with pytest.raises(TimeoutError):
            zygote.wait(0.05)
        zygote.connection.close()
        assert zygote.wait(10) == 3
        zygote.close()
    assert started[1].returncode == 0


def test_only_one_can_take_it(started: tuple[Zygote, subprocess.Popen[bytes]]) -> None:
    with Offer(*started) as offer:
        first = take(offer.name)
        with pytest.raises(ConnectionError):
            take(offer.name)
        first.close()


def test_what_nobody_took_ends_with_the_offer(started: tuple[Zygote, subprocess.Popen[bytes]]) -> None:
    with Offer(*started):
        pass
    assert started[1].returncode is not None


def test_it_ends_when_the_one_that_took_it_lets_go_though_the_offer_lasts(
    started: tuple[Zygote, subprocess.Popen[bytes]],
) -> None:
    with Offer(*started) as offer:
        zygote = take(offer.name)
        assert zygote.connection.recv(5) == b"ready"
        zygote.connection.close()
        assert started[1].wait(10) == 0
        zygote.close()


def test_a_keeper_that_was_killed_counts_as_a_killed_zygote(started: tuple[Zygote, subprocess.Popen[bytes]]) -> None:
    zygote, _ = started
    os.kill(zygote.keeper, signal.SIGKILL)
    assert zygote.wait(10) == -signal.SIGKILL
    zygote.close()


def test_the_word_that_ends_a_job_is_heard_though_it_comes_with_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool]] = []
    monkeypatch.setattr(zygotes, "_run", lambda line, *about: seen.append((line, about[-1])))
    ours, its = socket.socketpair()
    with ours, its:
        ours.sendall(b"abort\none\nabort\nabort\n")
        ours.shutdown(socket.SHUT_WR)
        zygotes._serve(its, None, None, spawn=False)
        assert seen == [("one", True)]
