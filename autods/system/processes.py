"""Processes on Linux: their state, their end, and the files that they leave behind."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import re
import signal
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_REAP_EVERY_S = 0.005
# Files in /dev/shm that are named after their maker: torch's (`at::NewProcessWideShmHandle`), and those of LLVM's and
# Intel's OpenMP (`__kmp_register_library_startup`).
_SHARED_FILES = (r"torch_{pid}_\d+_\d+", r"__KMP_REGISTERED_LIB_{pid}_{uid}")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, however the parent dies."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the call
        os._exit(97)


def machine_id() -> str:
    """Return an id that two processes share when they see each other's pids: one boot, one pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.readlink('/proc/self/ns/pid')}"


@functools.cache
def has_pidfd() -> bool:
    """Whether the kernel has descriptors of processes; sandboxes such as gVisor may lack them."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError):
        return False
    return True


def fork_watched() -> tuple[int, int, int]:
    """Fork. Return (pid, a descriptor that becomes readable when the child ends, −1).

    In the child: (0, −1, a descriptor that it must keep open). Without pidfd this is a pipe, whose other end the
    child's own children hold as well.
    """
    pair = None if has_pidfd() else os.pipe()
    pid = os.fork()
    if pid == 0:
        return 0, -1, -1 if pair is None else pair[1]
    if pair is None:
        return pid, os.pidfd_open(pid), -1
    os.close(pair[1])
    return pid, pair[0], -1


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process, so that it can find them all."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def redirect_and_close(log: int, keep: set[int]) -> None:
    """Read stdin from /dev/null, write stdout and stderr to `log`, and close all other descriptors but `keep`."""
    null = os.open("/dev/null", os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in {0, 1, 2} | keep:
            with contextlib.suppress(OSError):
                os.close(int(name))


def read_status(pid: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status; empty when the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def is_stopped(pid: int) -> bool:
    """Whether the process is in state T (SIGSTOP)."""
    return read_status(pid).get("State", "").startswith("T")


def is_handling_signal(pid: int, number: signal.Signals) -> bool:
    """Whether the signal is pending, or the main thread is in its handler, during which it is blocked."""
    status = read_status(pid)
    masks = (int(status.get(name, "0"), 16) for name in ("SigPnd", "ShdPnd", "SigBlk"))
    return status.get("State", "Z")[0] not in "ZX" and any(mask >> (number - 1) & 1 for mask in masks)


def list_children() -> list[int]:
    """Return the pids of this process's children, adopted ones included."""
    pids: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            pids += map(int, Path(f"/proc/self/task/{task}/children").read_text().split())
    return pids


def prefer_for_oom_kill() -> None:
    """Have the kernel's OOM killer prefer this process, so that a rank dies and not the process that watches it.

    Ray gives its own workers the worst score otherwise.
    """
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")


def kill_children(limit_s: float) -> list[int]:
    """Kill and reap children until none is left, for `limit_s` seconds at most; return those that are left.

    A process in state D waits for a device or a file system, and ends when that answers.
    """
    until = time.monotonic() + limit_s
    while pids := list_children():
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() >= until:
            break
        time.sleep(_REAP_EVERY_S)
    return list_children()


def describe_process(pid: int) -> str:
    """'process 7 (python) in state D (disk sleep), in rpc_wait_bit_killable'."""
    status = read_status(pid)
    try:
        place = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        place = ""
    where = f", in {place}" if place not in ("", "0") else ""
    return f"process {pid} ({status.get('Name', '?')}) in state {status.get('State', '?')}{where}"


# They work for long, or wait for others of these that do.
_COMPILERS = frozenset(
    ("ninja", "make", "cmake", "nvcc", "cicc", "ptxas", "hipcc", "cc1", "cc1plus", "clang", "clang++", "ld", "lto1")
)


def is_compiling(session: int) -> bool:
    """Whether a compiler runs in this session, for an op of DeepSpeed or of the user, or for a kernel."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                before, _, after = Path(f"/proc/{entry}/stat").read_text().rpartition(") ")
                state, _, _, leader, *_ = after.split()
                if before.partition("(")[2] in _COMPILERS and int(leader) == session and state not in "ZX":
                    return True
    return False


def list_shared_memory() -> frozenset[str]:
    """Return the names in /dev/shm, which other programs and other containers may use as well."""
    try:
        return frozenset(os.listdir("/dev/shm"))
    except OSError:
        return frozenset()


def unlink_shared_memory(pids: Iterable[int], before: frozenset[str]) -> None:
    """Unlink what these processes left in /dev/shm; a process that was killed cannot unlink its own.

    A file is theirs when it has the name that a library of theirs gives it, belongs to this user, and was not there
    `before` they started.
    """
    patterns = [pattern.format(pid=pid, uid=os.getuid()) for pid in pids for pattern in _SHARED_FILES]
    ours = re.compile("|".join(patterns or ["(?!)"]))
    for name in filter(ours.fullmatch, list_shared_memory() - before):
        with contextlib.suppress(OSError):
            if os.lstat(path := f"/dev/shm/{name}").st_uid == os.getuid():
                os.unlink(path)


def temporary_folder(pid: int) -> Path:
    """Return the link to a rank's folder for temporary files, which `unlink_temporary` removes.

    Containers that share /tmp may have ranks of the same pid, each in a pid namespace of its own.
    """
    return Path("/tmp") / f"autods-{pid}-{os.readlink('/proc/self/ns/pid').strip('pid:[]')}"


def unlink_temporary(pids: Iterable[int]) -> None:
    """Unlink the temporary folders of ranks that have ended."""
    for pid in pids:
        with contextlib.suppress(OSError):
            temporary_folder(pid).unlink()


def folder_bytes(folder: Path) -> int:
    """Return the bytes on disk of all files below, as the file system counts them."""
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
    return total


def read_tail(path: Path, size: int = 8000) -> str:
    """Return the last `size` bytes of a text file; '' when it does not exist."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def shorten_log(path: Path, most: int = 2**24, ends: int = 2**18) -> None:
    """Cut the middle out of a log longer than `most` bytes. Processes that append to it may go on."""
    try:
        if os.stat(path).st_size <= most:
            return
        with open(path, "r+b") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(size - ends)
            last = file.read(ends)
            os.ftruncate(file.fileno(), ends)
        with open(path, "ab") as file:
            file.write(b"\n[... %d bytes left out ...]\n" % (size - 2 * ends) + last)
    except OSError:
        return


@contextlib.contextmanager
def die_with_peer(peer: socket.socket) -> Iterator[None]:
    """Die at once when the peer hangs up, even while this process is busy. The peer must not send anything."""
    flags = fcntl.fcntl(peer, fcntl.F_GETFL) & ~os.O_ASYNC
    fcntl.fcntl(peer, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(peer, fcntl.F_SETFL, flags | os.O_ASYNC)  # SIGIO, whose default is death
    try:
        has_hung_up = peer.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except OSError as error:
        has_hung_up = not isinstance(error, BlockingIOError)
    if has_hung_up:  # before the call
        os._exit(97)
    try:
        yield
    finally:
        fcntl.fcntl(peer, fcntl.F_SETFL, flags)
