"""What the shell, the container and the disks leave to a fit, and what Ray needs of it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import NO_ROOM, DiskFull, EnvironmentBroken, make_write_error
from ..units import format_bytes
from .host import find_pids_left

_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A limit of the shell: `ulimit`'s option `flag`, which counts in units of `unit` bytes.

    `least` is what a Ray of our own needs, beside the `used` that this user has taken already.
    """

    number: int
    flag: str
    noun: str
    least: int
    unit: int = 1
    used: Callable[[], int] = lambda: 0


def count_threads() -> int:
    """Return how many threads this user runs on this machine, as `ulimit -u` counts them."""
    count = 0
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{entry}").st_uid == os.getuid():
                    count += len(os.listdir(f"/proc/{entry}/task"))
    return count


# Measured on 2 cores with Ray 2.60: GCS, raylet, its agents, an actor, the driver and a zygote. They have 200 threads
# together, 60 open files each, 1.4 GiB of addresses and 420 MiB of data each, and an object store of 80 MiB.
THREADS = 200
LIMITS = (
    Limit(number=resource.RLIMIT_NPROC, flag="-u", noun="threads", least=THREADS, used=count_threads),
    Limit(number=resource.RLIMIT_NOFILE, flag="-n", noun="open files", least=256),
    Limit(number=resource.RLIMIT_AS, flag="-v", noun="KiB of addresses", least=2**31, unit=1024),
    Limit(number=resource.RLIMIT_DATA, flag="-d", noun="KiB of data", least=2**29, unit=1024),
    Limit(number=resource.RLIMIT_STACK, flag="-s", noun="KiB of stack", least=2**20, unit=1024),
    Limit(number=resource.RLIMIT_FSIZE, flag="-f", noun="KiB of a file", least=2**27, unit=1024),
)


def check_limits(limits: Sequence[Limit] = LIMITS) -> None:
    """Raise EnvironmentBroken where Ray would not start, or abort, under a limit of the shell or of the container."""
    for limit in limits:
        most, _ = resource.getrlimit(limit.number)
        if most == resource.RLIM_INFINITY or (limit.number == resource.RLIMIT_NPROC and os.getuid() == 0):
            continue  # the kernel has no such limit for root
        need = limit.least + limit.used()
        if most < need:
            raise EnvironmentBroken(
                f"`ulimit {limit.flag}` is {most // limit.unit}: Ray needs {need // limit.unit} {limit.noun}\n"
                f"  raise it: ulimit {limit.flag} {need // limit.unit} or more, or ask who set it"
            )
    left = find_pids_left()
    if left is not None and left < THREADS:
        raise EnvironmentBroken(
            f"the container or job may start {left} more threads: Ray needs {THREADS}\n"
            "  raise its pids limit (`docker run --pids-limit`)"
        )


def find_lack(folder: Path, size: int) -> str | None:
    """Return why about `size` bytes cannot be written into the folder: too few are free, or a quota; None if they can.

    They are reserved for a moment, because nothing else shows the quota of a user. Where the file system cannot
    reserve, such as older NFS, what `statvfs` calls free counts alone; it knows quotas of projects and servers.
    """
    if size > (free := shutil.disk_usage(folder).free):
        return f"about {format_bytes(size)} of disk are needed and {format_bytes(free)} are free"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            # Not `posix_fallocate`: where the file system cannot reserve, that writes into every block.
            failed = _LIBC.fallocate(file.fileno(), 0, ctypes.c_int64(0), ctypes.c_int64(size))
            number = ctypes.get_errno() if failed else 0
    except OSError as error:
        number = error.errno or 0
    if number not in NO_ROOM:
        return None
    return f"about {format_bytes(size)} of disk are needed and cannot be reserved: {os.strerror(number)}"


def check_space(folder: Path, least_bytes: int, user: str) -> None:
    """Raise DiskFull where less is free on the disk of the folder than `user`, such as 'a trial', needs."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise make_write_error(folder, error) from None
    if free < least_bytes:
        need = f"{user} needs {format_bytes(least_bytes)}, and {format_bytes(free)} are free"
        raise DiskFull(f"{folder}: the disk is full: {need}\n  free some space there; the same command goes on")
