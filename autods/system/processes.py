"""Processes on Linux: their state, their end, and the files that they leave behind."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import glob
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_REAP_EVERY_S = 0.005
# Files in /dev/shm that are named after their maker: torch's (`at::NewProcessWideShmHandle`), those of LLVM's and
# Intel's OpenMP (`__kmp_register_library_startup`), and Python's after `put_pid_into_names`.
_SHARED_FILES = (
    r"torch_{pid}_\d+_\d+", r"__KMP_REGISTERED_LIB_{pid}_{uid}", r"psm_{pid}_[0-9a-f]+", r"sem\.mp-{pid}-\w+",
)  # fmt: skip


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, however the parent dies."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the call
        os._exit(97)


def leave_sigterm_to_driver() -> None:
    """Let this process take no notice of SIGTERM: a scheduler sends it to all processes of a job, and the driver acts.

    Processes that it starts have their own way with it: other programs their default, its forks that of the system.
    """
    owner = os.getpid()

    def pass_over(number: int, frame: object) -> None:
        if os.getpid() != owner:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, pass_over)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # it is blocked in Ray's processes, and so in ours


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


def python_command(module: str) -> list[str]:
    """Return the command that runs a module of ours, as `python -m` does.

    The current folder is no place for imports, or a file of the user's could hide a module: unless we lie there.
    """
    package = Path(__file__).parents[2]
    options = [] if package == Path.cwd() else ["-P"]
    return [sys.executable, *options, "-m", module]


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


def read_status(pid: int | Literal["self"]) -> dict[str, str]:
    """Return the fields of /proc/PID/status; empty when the process is gone."""
    try:  # the kernel cuts names after 15 bytes, also amid a character
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def status_bytes(pid: int | Literal["self"], *names: str) -> dict[str, int]:
    """Return fields of /proc/PID/status that are given in kB, in bytes; fields that it lacks are left out."""
    status = read_status(pid)
    return {name: int(status[name].split()[0]) * 1024 for name in names if name in status}


def is_stopped(pid: int) -> bool:
    """Whether the process is in state T (SIGSTOP)."""
    return read_status(pid).get("State", "").startswith("T")


def waits_for_disk(pid: int) -> bool:
    """Whether the process's main thread is in state D: it waits for a disk, a file server or a device."""
    return read_status(pid).get("State", "").startswith("D")


def is_handling_signal(pid: int, number: int) -> bool:
    """Whether the signal is pending, or the main thread is in its handler, during which it is blocked."""
    status = read_status(pid)
    masks = (int(status.get(name, "0"), 16) for name in ("SigPnd", "ShdPnd", "SigBlk"))
    return status.get("State", "Z")[0] not in "ZX" and any(mask >> (number - 1) & 1 for mask in masks)


def list_children() -> list[int]:
    """Return the pids of the children of this process, adopted ones included."""
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                pids += map(int, (task / "children").read_text().split())
    return pids


def list_session(leader: int) -> list[int]:
    """Return the pids of the processes in the session that this one leads, the newest last."""
    pids = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.getsid(int(name)) == leader:
                pids.append(int(name))
    return sorted(pids)


def count_moved_bytes(pid: int) -> int:
    """Return the bytes that a process has read and written so far, from files and from disks; 0 if that is unknown."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        counts = {name: int(value) for name, _, value in (line.partition(":") for line in lines)}
    except (OSError, ValueError):
        return 0
    return counts.get("rchar", 0) + counts.get("wchar", 0) + counts.get("read_bytes", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionUse:
    """What the processes of a session have done so far."""

    cpu_s: float
    moved_bytes: int
    waits_for_disk: bool


def measure_work(leader: int) -> SessionUse:
    """Return what the processes of the session that this one leads have done; those that are gone do not count."""
    ticks, moved_bytes, waits_for_disk = 0, 0, False
    for pid in list_session(leader):
        with contextlib.suppress(OSError):
            fields = _read_stat(Path(f"/proc/{pid}/stat"))
            ticks += int(fields[11]) + int(fields[12])  # in user mode and in the kernel
            moved_bytes += count_moved_bytes(pid)
            waits_for_disk |= any(_read_stat(thread)[0] == "D" for thread in Path(f"/proc/{pid}/task").glob("*/stat"))
    return SessionUse(cpu_s=ticks / os.sysconf("SC_CLK_TCK"), moved_bytes=moved_bytes, waits_for_disk=waits_for_disk)


def _read_stat(path: Path) -> list[str]:
    """The fields of a process or a thread after its name, which may hold blanks; the first is its state."""
    return path.read_text(errors="replace").rpartition(") ")[2].split()


def prefer_for_oom_kill() -> None:
    """Have the kernel's OOM killer prefer this process, so that a rank dies and not the process that watches it.

    Ray gives its own workers the worst score otherwise.
    """
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")


def forbid_core_dump() -> None:
    """Have the kernel write no core file of this process and its children, unless they ask for one themselves."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))


def kill_children(limit_s: float, *, spared: int | None = None) -> list[int]:
    """Kill and reap children until none is left, for `limit_s` seconds at most; return those that are left.

    The child `spared` lives on, and is not returned. A process in state D waits for a device or a file system, and ends
    when that answers.
    """

    def list_others() -> list[int]:
        return [pid for pid in list_children() if pid != spared]

    until = time.monotonic() + limit_s
    while pids := list_others():
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() >= until:
            break
        time.sleep(_REAP_EVERY_S)
    return list_others()


def describe_process(pid: int) -> str:
    """'process 7 (python) in state D (disk sleep), in rpc_wait_bit_killable'."""
    status = read_status(pid)
    try:
        channel = Path(f"/proc/{pid}/wchan").read_text()  # the kernel's function in which it waits
    except OSError:
        channel = ""
    waits = f", in {channel}" if channel not in ("", "0") else ""
    return f"process {pid} ({status.get('Name', '?')}) in state {status.get('State', '?')}{waits}"


# They work for long, or wait for others of these that do.
_COMPILERS = frozenset(
    ("ninja", "make", "cmake", "nvcc", "cicc", "ptxas", "hipcc", "cc1", "cc1plus", "clang", "clang++", "ld", "lto1")
)


def is_compiling(session: int) -> bool:
    """Whether a compiler runs in this session, for an op of DeepSpeed or of the user, or for a kernel."""
    statuses = (read_status(pid) for pid in list_session(session))
    return any(status.get("Name") in _COMPILERS and status["State"][0] not in "ZX" for status in statuses)


def list_shared_memory() -> frozenset[str]:
    """Return the names in /dev/shm, which other programs and other containers may use as well."""
    try:
        return frozenset(os.listdir("/dev/shm"))
    except OSError:
        return frozenset()


def put_pid_into_names() -> None:
    """Have Python name the shared memory and the semaphores of this process after it, so that we can remove them.

    Python's own helper would remove those of a killed process, and it is killed with it.
    """
    from multiprocessing import process, shared_memory

    memory: Any = shared_memory
    if hasattr(memory, "_SHM_NAME_PREFIX") and hasattr(memory, "_SHM_SAFE_NAME_LENGTH"):
        memory._SHM_NAME_PREFIX = f"/psm_{os.getpid()}_"
        memory._SHM_SAFE_NAME_LENGTH = len(memory._SHM_NAME_PREFIX) + 8
    options = getattr(process.current_process(), "_config", {})
    if "semprefix" in options:
        options["semprefix"] = f"/mp-{os.getpid()}"


def shared_of(pids: Iterable[int], names: Iterable[str]) -> set[str]:
    """Return those names in /dev/shm that a library of these processes gives to its files."""
    patterns = [pattern.format(pid=pid, uid=os.getuid()) for pid in pids for pattern in _SHARED_FILES]
    return set(filter(re.compile("|".join(patterns or ["(?!)"])).fullmatch, names))


def unlink_shared_memory(pids: Iterable[int], before: frozenset[str]) -> None:
    """Unlink what these processes left in /dev/shm; a process that was killed cannot unlink its own.

    A file is theirs when it has the name that a library of theirs gives it, belongs to this user, and was not there
    `before` they started.
    """
    for name in shared_of(pids, list_shared_memory() - before):
        with contextlib.suppress(OSError):
            if os.lstat(path := f"/dev/shm/{name}").st_uid == os.getuid():
                os.unlink(path)


def is_open(path: Path) -> bool:
    """Whether a process of this machine whose descriptors may be read has the file open."""
    for descriptor in glob.iglob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.path.samefile(descriptor, path):
                return True
    return False


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


def find_log_parts(path: Path) -> list[Path]:
    """Return the files NAME.1, NAME.2, … into which `split_log` has moved the beginning of a log, in order."""
    parts = [part for part in path.parent.glob(f"{path.name}.*") if part.suffix[1:].isdecimal()]
    return sorted(parts, key=lambda part: int(part.suffix[1:]))


def split_log(path: Path, *, last_parts: int, most: int = 2**24, end: int = 2**18) -> None:
    """Move all but the last lines of a log longer than `most` bytes into the next part, see `find_log_parts`.

    The first part and `last_parts` others stay. For each one that is removed, a line at the end of the first part says
    how much is left out. Processes that append to the log may go on. Where the disk has no room, it stays whole.
    """
    try:
        if os.stat(path).st_size <= most:
            return
        parts = find_log_parts(path)
        part = path.with_name(f"{path.name}.{int(parts[-1].suffix[1:]) + 1 if parts else 1}")
        with open(path, "r+b") as log:
            log.seek(-end, os.SEEK_END)
            log.readline()  # a part ends with a line
            cut = log.tell()
            try:
                with open(part, "wb") as file:
                    for begin in range(0, cut, 2**20):
                        file.write(os.pread(log.fileno(), min(2**20, cut - begin), begin))
            except OSError:
                part.unlink()
                return
            rest = log.read()
            os.ftruncate(log.fileno(), 0)
        with open(path, "ab") as file:
            file.write(rest)
        for old in [*parts, part][1 : -last_parts or None]:
            size = old.stat().st_size
            old.unlink()
            with open(parts[0], "ab") as file:
                file.write(b"[... %s is left out: %d bytes ...]\n" % (os.fsencode(old.name), size))
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


def ask_module(
    module: str, *words: str, stdin: str = "", variables: Mapping[str, str] | None = None, limit_s: float
) -> Any:
    """Run `python -m MODULE WORDS` with these further variables; return the JSON in the last line that it prints.

    A process of its own is for an import that must not happen in this one. Raises RuntimeError with the last line of
    its errors.
    """
    try:
        ended = subprocess.run(
            [*python_command(module), *words],
            input=stdin,
            env={**os.environ, **(variables or {})},
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no answer within {limit_s:.0f} s") from None
    lines = ended.stdout.strip().splitlines()
    if ended.returncode or not lines:
        raise RuntimeError((ended.stderr.strip().splitlines() or ["no answer"])[-1])
    return json.loads(lines[-1])
