"""Measure and limit the memory of CPU ranks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..units import format_bytes

_LIBC = ctypes.CDLL(None)
_MAX_MMAP = re.compile(rb"max mmap bytes\s*=\s*(\d+)")


class _Info(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mapped:
    """Bytes that malloc holds in mappings of their own: now, and at most since the process (or its parent) began."""

    now_bytes: int
    most_bytes: int


def mapped() -> Mapped | None:
    """None where the C library is not glibc 2.33 or later."""
    try:
        mallinfo = _LIBC.mallinfo2
        statistics = _LIBC.malloc_stats
    except AttributeError:
        return None
    mallinfo.restype = _Info
    found = _MAX_MMAP.search(_printed(statistics))
    return Mapped(now_bytes=int(mallinfo().hblkhd), most_bytes=int(found[1])) if found else None


def _printed(statistics: object) -> bytes:
    """malloc_stats writes to file descriptor 2, and nowhere else."""
    assert callable(statistics)
    sys.stderr.flush()
    memory, before = os.memfd_create("malloc_stats"), os.dup(2)
    try:
        os.dup2(memory, 2)
        statistics()
    finally:
        os.dup2(before, 2)
        os.close(before)
    size = os.lseek(memory, 0, os.SEEK_CUR)
    text = os.pread(memory, size, 0)
    os.close(memory)
    return text


_PAGE = os.sysconf("SC_PAGE_SIZE")


class Meter(Protocol):
    """`sample` is called at every change of phase; `peaks` and `free_bytes` at any time after `start`."""

    def start(self) -> None:
        """Count from here."""

    def sample(self) -> None:
        """Look once; cheap."""

    def peaks(self) -> dict[str, int | None]:
        """Peak bytes by tier, and what else is worth keeping."""

    def free_bytes(self) -> int | None:
        """What is left of the limit now."""

    def begin_steps(self) -> None:
        """The engine is initialised: what the allocator has to repeat from here on, it will repeat in every step."""

    def leave_device(self) -> dict[str, int]:
        """From here on the host works, on a checkpoint; what the device had to hold until then, where it is known."""

    def allocator(self) -> dict[str, int]:
        """Of the device: `idle_bytes` that it reserves without a tensor, and its `alloc_retries` in the steps."""

    def synchronize(self) -> None:
        """Wait until the device has done what it was told, so that clocks mean something."""


def status_bytes(*names: str) -> dict[str, int]:
    """Fields of /proc/self/status that are given in kB, as bytes."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in names:
            found[name] = int(value.split()[0]) * 1024
    return found


@dataclass(slots=True)
class CpuMeter:
    """A CPU rank: `limit_bytes` becomes a hard limit of the process's private memory."""

    limit_bytes: int | None
    _hard_limit: int = resource.RLIM_INFINITY  # only root may raise it
    _data_at_start: int = 0
    _anon_at_start: int = 0
    _peak_data: int = 0
    _mapped_at_start: Mapped | None = None

    def start(self) -> None:
        """Reset the kernel's high-water mark and set the budget."""
        with contextlib.suppress(OSError):  # an older kernel: the mark then includes what the zygote once held
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM := VmRSS
        now = status_bytes("VmData", "RssAnon")
        self._data_at_start, self._anon_at_start = now["VmData"], now["RssAnon"]
        self._mapped_at_start = mapped()
        if self.limit_bytes is not None:
            self._hard_limit = hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            budget = now["VmData"] + self.limit_bytes
            if hard != resource.RLIM_INFINITY and budget > hard:
                raise OSError(f"ulimit -Hd lets a process hold {format_bytes(hard)}: {format_bytes(budget)} are needed")
            resource.setrlimit(resource.RLIMIT_DATA, (budget, hard))

    def lift(self) -> None:
        """Take the budget away, so that a rank that ran out can still write its result."""
        if self.limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (self._hard_limit, self._hard_limit))

    def sample(self) -> None:
        with open("/proc/self/statm", "rb", buffering=0) as statm:
            pages = int(statm.read().split()[5])  # data + stack
        self._peak_data = max(self._peak_data, pages * _PAGE - self._data_at_start)

    def peaks(self) -> dict[str, int | None]:
        self.sample()
        now = status_bytes("VmHWM", "RssFile", "RssShmem", "VmData")
        touched = now["VmHWM"] - now["RssFile"] - now["RssShmem"] - self._anon_at_start
        peak = max(self._peak_data, touched, self._peak_mapped(now["VmData"]))
        return {"device": peak, "host": touched, "pinned": 0}

    def _peak_mapped(self, data: int) -> int:
        """Malloc's own high-water mark, and what else of the private memory grew (the heap, Python's arenas)."""
        before, after = self._mapped_at_start, mapped()
        if before is None or after is None or after.most_bytes <= before.most_bytes:
            return 0  # the zygote once held more than this trial: the other two marks must do
        grown = data - self._data_at_start
        return after.most_bytes - before.now_bytes + grown - (after.now_bytes - before.now_bytes)

    def free_bytes(self) -> int | None:
        if self.limit_bytes is None:
            return None
        now = status_bytes("VmData")["VmData"] - self._data_at_start
        # An exception frees what was being built before it can be caught: the high-water mark remembers it.
        return max(0, self.limit_bytes - max(now, self.peaks()["device"] or 0))

    def leave_device(self) -> dict[str, int]:
        """A checkpoint is read into and written from host memory, which is no part of a device's budget."""
        peak = self.peaks()["device"] or 0
        self.lift()
        return {"device": peak}

    def begin_steps(self) -> None:
        """Malloc does not count retries."""

    def allocator(self) -> dict[str, int]:
        return {}

    def synchronize(self) -> None:
        """CPU operators are done when they return."""
