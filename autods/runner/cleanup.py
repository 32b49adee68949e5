"""What a fit must not leave behind, and the process that ends and removes it when the fit's process is killed.

A fit has a private folder, mode 0700, with a random name. Processes of the fit carry the folder's path in their
environment, and so does whatever they start. The guard is a small process beside the fit's. It waits until the fit
says that it is done, or is dead. Then it ends the processes that carry the path, and removes the folder and the files
that ranks left. A guard that was killed is made up for by the next fit of the same user on this machine.

The module is run as a program too, with nothing but the standard library and its neighbours that need no more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ..errors import EnvironmentBroken
from ..system import private, processes

VARIABLE = "AUTODS_SESSION"  # its value is the path of the fit's private folder
ROOT = Path("/tmp")  # not TMPDIR: the path of a socket may have 107 characters
PREFIX = "autods-ray."
GRACE_S = 4.0  # for a zygote, to end its ranks and remove their files by itself
_KILL_S = 5.0
_POLL_S = 0.05
_QUIET_SCANS = 2  # in the middle of an exec a process has no environment
_CLOSE_S = 15.0
_NEW_S = 60.0  # a folder is locked within much less
_DONE = b"done"
_JOBS = "jobs"
_JOB_BYTES = 2**20  # more than any note of a job has


@dataclasses.dataclass(slots=True, eq=False)
class _Session:
    """A private folder, the descriptor that holds its lock, its guard, and how many have opened the session."""

    folder: Path
    lock: int
    guard: subprocess.Popen[bytes]
    holders: int = 0


_opened: dict[int, _Session] = {}  # the session that this process, by its pid, has opened
# One thread of a process opens or leaves a session at a time. By pid: a fork must not wait for a thread that it lacks.
_doors: dict[int, threading.Lock] = {}


def present_folder() -> Path | None:
    """Return the private folder of the session that this process has opened. A forked child has none."""
    session = _opened.get(os.getpid())
    return None if session is None else session.folder


def has_session(environment: Mapping[str, str]) -> bool:
    """Whether these variables name the private folder of a session on this machine."""
    try:
        return private.is_private(os.lstat(environment.get(VARIABLE) or "/nonexistent"))
    except (OSError, ValueError):
        return False


def session_variables() -> dict[str, str]:
    """Return the variables by which the guard finds a process; empty where this process has no session."""
    folder = present_folder()
    return {} if folder is None else {VARIABLE: str(folder)}


def simulator_variables() -> dict[str, str]:
    """Return the variables of the simulated device's processes: those of the session, in which its files lie, too."""
    folder = present_folder()
    return {} if folder is None else {VARIABLE: str(folder), "TMPDIR": str(folder)}


@contextlib.contextmanager
def open_session() -> Iterator[Path]:
    """The private folder of this process's fit, watched over by a guard. At the end nothing is left of the fit.

    A second session inside of the first one, or in another thread, has the same folder, until the last of them ends.
    Raises EnvironmentBroken where the folder cannot be made or the guard cannot be started.
    """
    owner = os.getpid()
    with _find_door():
        session = _opened.get(owner) or _start_session()
        _opened[owner] = session
        session.holders += 1
    try:
        yield session.folder
    finally:
        with _find_door():
            session.holders -= 1
            is_last = session.holders == 0
            if is_last and os.getpid() == owner:
                del _opened[owner]
        if is_last:
            if os.getpid() == owner:  # else this is a fork, which is leaving
                _end_guarded(session)
            os.close(session.lock)


def _find_door() -> threading.Lock:
    return _doors.setdefault(os.getpid(), threading.Lock())


def _start_session() -> _Session:
    remove_abandoned()
    folder, lock = make_session_folder()
    try:
        return _Session(folder, lock, start_guard(folder, lock))
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        raise EnvironmentBroken(
            f"a process cannot be started ({error.strerror})\n  see `ulimit -u` and the free memory of this machine"
        ) from None


def _end_guarded(session: _Session) -> None:
    """Have the guard end the session, or end it here where the guard cannot."""
    if not dismiss_guard(session.guard):
        shutil.rmtree(session.folder, ignore_errors=True)
    elif session.folder.exists():  # the guard was killed
        end_session(session.folder, grace_s=0.0)


def make_session_folder() -> tuple[Path, int]:
    """Make the private folder of this process's fit. Return it, and the descriptor that holds its lock.

    `remove_abandoned` of a later fit finds it by its place and its name. Raises EnvironmentBroken.
    """
    folder = private.make_folder(f"{PREFIX}{os.getpid()}-", str(ROOT))
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    with contextlib.suppress(OSError):  # a file system without locks, where nobody removes the folder either
        fcntl.flock(lock, fcntl.LOCK_EX)
    (folder / _JOBS).mkdir(mode=0o700)
    return folder, lock


# ---------------------------------------------------------------------------------------------------- the guard


def start_guard(folder: Path, lock: int) -> subprocess.Popen[bytes]:
    """Start the process that waits for the end of this one. It shares the lock on the folder."""
    with contextlib.ExitStack() as stack:
        descriptors = [_above_stderr(lock)]
        if processes.has_pidfd():
            descriptors.append(os.pidfd_open(os.getpid()))
            descriptors.append(_above_stderr(descriptors[1]))
        for fd in descriptors:
            stack.callback(os.close, fd)
        passed = [descriptors[0], *descriptors[2:]]
        # Isolated: neither PYTHON* variables nor files in the working directory change what it imports.
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); import {__name__} as cleanup; "
        words = [str(folder), str(GRACE_S), *map(str, passed)]
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code + "cleanup.main(sys.argv[1:])", *words],
            pass_fds=passed,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # a pipe of ours would stay open for its reader
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # neither Ctrl-C nor a closing terminal is meant for it
        )


def dismiss_guard(guard: subprocess.Popen[bytes]) -> bool:
    """Tell the guard that the fit is done, and wait until it has removed what is left; False if it does not end.

    It may read the environment of a process that waits for a disk, which holds up the reader as well.
    """
    assert guard.stdin is not None
    with contextlib.suppress(OSError):  # it was killed
        guard.stdin.write(_DONE)
        guard.stdin.flush()
    with contextlib.suppress(OSError):
        guard.stdin.close()
    try:
        guard.wait(_CLOSE_S)
    except subprocess.TimeoutExpired:
        guard.kill()
        return False
    return True


def main(argv: Sequence[str]) -> None:
    """Wait for the end of the fit, then end its processes and remove its files.

    `argv` has the private folder, and the seconds that its processes have to end by themselves. Then come the
    descriptor of the folder's lock, and a pidfd of the fit's process where the kernel has such.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # it ends when the fit has ended, not before
        signal.signal(number, signal.SIG_IGN)
    folder, grace_s, _, *driver = argv
    is_done = wait_for_end(sys.stdin.fileno(), int(driver[0]) if driver else None)
    end_session(Path(folder), grace_s=0.0 if is_done else float(grace_s))


def wait_for_end(pipe: int, driver: int | None) -> bool:
    """Wait until the fit is done (True) or its process is dead (False).

    `pipe` is read for the word that it is done. With `driver`, a pidfd, the pipe's end alone proves no death.
    A child of the fit's process may hold the other end, and the process itself may have closed it.
    """
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    if driver is not None:
        poll.register(driver, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if pipe in ready:
            if os.read(pipe, len(_DONE)) == _DONE:
                return True
            if driver is None:
                return False
            poll.unregister(pipe)
        elif driver in ready:
            return False


def _above_stderr(fd: int) -> int:
    """Duplicate a descriptor to a number above 2, which a child's standard streams leave alone."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


# ---------------------------------------------------------------------------------- what a session leaves behind


def end_session(folder: Path, *, grace_s: float) -> None:
    """End the processes of the session and remove its files. They have `grace_s` seconds to end by themselves."""
    end_processes(folder, grace_s)
    for note in _list_notes(folder):
        remove_leftovers(note)
    shutil.rmtree(folder, ignore_errors=True)  # follows no links


def end_processes(folder: Path, grace_s: float) -> list[int]:
    """End the processes that carry this folder in their environment; return those that cannot be ended.

    One that is stopped is continued, so that it can end by itself too.
    """
    began, quiet = time.monotonic(), 0
    while True:
        pids = find_processes(folder)
        quiet = 0 if pids else quiet + 1
        waited_s = time.monotonic() - began
        if quiet == _QUIET_SCANS or waited_s > grace_s + _KILL_S:  # some wait for a device or a file system
            return pids
        for pid in pids:
            if waited_s >= grace_s:
                _send_signal(pid, signal.SIGKILL, folder)
            elif processes.is_stopped(pid):
                _send_signal(pid, signal.SIGCONT, folder)
        time.sleep(_POLL_S)


def find_processes(folder: Path) -> list[int]:
    """Return the pids of this user's processes, other than this one, that carry the folder in their environment."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [pid for pid in pids if pid != os.getpid() and _carries(pid, folder)]


def _carries(pid: int, folder: Path) -> bool:
    """Whether the process carries the folder in its environment. A zombie has none any more."""
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return False
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{VARIABLE}={folder}".encode() in environment.split(b"\0")


def _send_signal(pid: int, number: signal.Signals, folder: Path) -> None:
    with contextlib.suppress(OSError):
        if not processes.has_pidfd():
            os.kill(pid, number)
            return
        process = os.pidfd_open(pid)
        try:
            if _carries(pid, folder):  # it still has this pid
                signal.pidfd_send_signal(process, number)
        finally:
            os.close(process)


def remove_abandoned() -> None:
    """End and remove what is left of this user's fits that were killed together with their guards.

    A fit and its guard hold the lock of its folder as long as one of them lives. The lock tells, and no pid: the fit
    may run in another container that shares /tmp. A new folder that is empty is left: its maker is about to lock it.
    """
    for old in ROOT.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(old, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if private.is_private(os.fstat(lock)):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where one of them lives
                    if any(old.iterdir()) or time.time() - os.fstat(lock).st_mtime > _NEW_S:
                        end_session(old, grace_s=0.0)
            finally:
                os.close(lock)


# --------------------------------------------------------------------- what the ranks of a job would leave behind


def note_job(pids: Iterable[int], folders: Iterable[str], shared_before: frozenset[str]) -> Path | None:
    """Note what the ranks of this process's job would leave if all of us were killed; return the note.

    `folders` are removed with all that is in them. `shared_before` are the names in /dev/shm before the ranks began.
    None where this process belongs to no session of this machine. Remove the note when the job has left nothing.
    """
    if not has_session(os.environ):
        return None
    note = find_note(os.getpid(), os.environ)
    try:
        ranks = list(pids)
        job = {"pids": ranks, "folders": list(folders), "shared": sorted(processes.shared_of(ranks, shared_before))}
        descriptor = os.open(note.with_suffix(".new"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w") as file:
            json.dump(job, file)
        os.replace(note.with_suffix(".new"), note)
    except OSError:  # a full disk
        return None
    return note


def find_note(pid: int, environment: Mapping[str, str]) -> Path:
    """Return the path of the note that a zygote of this pid and environment makes."""
    return Path(environment.get(VARIABLE) or "/nonexistent") / _JOBS / str(pid)


def remove_leftovers(note: Path | None) -> None:
    """Remove what the ranks of that note have left, and the note. Ranks that live keep theirs."""
    if note is None:
        return
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a note that was not finished
        with open(os.open(note, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            job = json.loads(file.read(_JOB_BYTES))
        gone = [pid for pid in map(int, job["pids"]) if not processes.read_status(pid)]
        processes.unlink_shared_memory(gone, frozenset(job["shared"]))
        for folder in job["folders"]:
            shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        note.unlink()


def _list_notes(folder: Path) -> list[Path]:
    try:
        return list((folder / _JOBS).iterdir())
    except OSError:
        return []
