"""Ends of a process without an exception. Each runs in a forked process, which reports through a pipe."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autods.rank import abrupt_ends
from autods.rank.abrupt_ends import watching
from autods.workload.protocol import WorkloadError


def end(act: Callable[[], object]) -> tuple[int, str]:
    """The exit code of a process that does this while it is watched, and what was reported of it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with watching(lambda error: os.write(writer, str(error).encode())) as watch:
                act()
                watch.check()
        finally:
            os._exit(7)  # it was not ended
    os.close(writer)
    report = b""
    while data := os.read(reader, 4096):
        report += data
    os.close(reader)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), report.decode()


def fork_and(child: Callable[[], object]) -> None:
    if os.fork() == 0:
        child()


def handle_and_leave() -> None:
    try:
        raise WorkloadError("the first error")
    except WorkloadError:
        os._exit(1)


# What ends the process, and what is reported with this file and a line.
ENDS: dict[str, tuple[Callable[[], object], str]] = {
    "os._exit": (lambda: os._exit(0), "os._exit(0) was called"),
    "exec": (lambda: os.execv("/bin/true", ["true"]), "os.execv('/bin/true') was called"),
    "SIGTERM": (lambda: os.kill(os.getpid(), signal.SIGTERM), "os.kill(os.getpid(), SIGTERM) was called"),
    "SIGSTOP": (lambda: signal.raise_signal(signal.SIGSTOP), "signal.raise_signal(SIGSTOP) was called"),
    "the group": (lambda: os.kill(0, signal.SIGKILL), "os.kill(0, SIGKILL) was called"),
    "the parent": (lambda: os.kill(os.getppid(), signal.SIGKILL), "must not end the processes that started it"),
    "everything": (lambda: os.kill(-1, signal.SIGKILL), "os.kill(-1, SIGKILL) was called"),
    "the parent's group": (lambda: os.killpg(os.getpgid(os.getppid()), 9), "SIGKILL) was called"),
    "descriptors": (lambda: os.closerange(0, 100), "os.closerange(0, 100) was called"),
    "a timer": (lambda: (signal.setitimer(signal.ITIMER_REAL, 0.01), time.sleep(9)), "a timer ended the process here"),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_abrupt_end_is_reported_with_its_line(name: str) -> None:
    act, message = ENDS[name]
    code, report = end(act)
    assert code == 1
    assert report.startswith(f"{__file__}:")
    assert message in report


# What a workload may do.
ALLOWED: dict[str, Callable[[], object]] = {
    "a signal that it handles": lambda: (
        signal.signal(signal.SIGTERM, lambda *_: None),
        os.kill(os.getpid(), signal.SIGTERM),
    ),
    "a question whether a process exists": lambda: os.kill(os.getppid(), 0),
    "a signal that does nothing": lambda: os.kill(os.getpid(), signal.SIGCHLD),
    "a helper that leaves": lambda: fork_and(lambda: os._exit(0)),
    "a helper that ends itself": lambda: fork_and(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "a program": lambda: subprocess.run(["true"], check=True),
    "its own descriptors": lambda: os.closerange(50_000, 50_100),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_a_workload_may_do_is_not_reported(name: str) -> None:
    assert end(ALLOWED[name]) == (7, "")


def test_the_error_that_is_handled_is_the_cause() -> None:
    assert end(handle_and_leave) == (1, "the first error")


def test_a_forked_process_that_comes_back_ends_both() -> None:
    code, report = end(lambda: os.fork())
    assert code == -signal.SIGKILL
    assert report.startswith(f"{__file__}:")
    assert "os.fork() was called, and the new process goes on as a second rank" in report


def test_the_stacks_of_a_crash_cannot_be_turned_off() -> None:
    def turn_off() -> None:
        faulthandler.enable()
        faulthandler.disable()
        if faulthandler.is_enabled():
            os._exit(0)

    assert "os._exit(0) was called" in end(turn_off)[1]


def test_nothing_is_reported_while_nothing_is_watched() -> None:
    code = "import os\nfrom autods.rank.abrupt_ends import watching\nwith watching(print):\n    pass\nos._exit(5)"
    root = str(Path(abrupt_ends.__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root}, capture_output=True)
    assert (done.returncode, done.stdout) == (5, b"")
