"""Measure and limit the memory of CPU ranks; the protocol of meters for both devices."""

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
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MAX_MMAP = re.compile(rb"max mmap bytes\s*=\s*(\d+)")


class Meter(Protocol):
    """Limits and measures the memory of one rank. Its trial calls `sample` at every change of phase."""

    def start(self) -> None:
        """Set the limit and begin to count."""

    def lift(self) -> None:
        """Remove the limit, so that a rank that ran out can still write its result."""

    def sample(self) -> None:
        """Look at the memory once; this must be cheap."""

    def peaks(self) -> dict[str, int | None]:
        """Return peak bytes by tier, and further figures of the device."""

    def free_bytes(self) -> int | None:
        """Return how much of the limit is left now."""

    def begin_steps(self) -> None:
        """The engine is initialised: allocation retries from here on would come in every step."""

    def leave_device(self) -> dict[str, int]:
        """From here on the host works on a checkpoint. Return the device's peak until now, if it counts alone."""

    def allocator(self) -> dict[str, int]:
        """Return `idle_bytes`, reserved on the device without a tensor, and `alloc_retries` of the steps."""

    def synchronize(self) -> None:
        """Wait until the device is done, so that clocks can be read."""


@dataclass(slots=True)
class CpuMeter:
    """The meter of a CPU rank: `limit_bytes` becomes a hard limit of the process's private memory."""

    limit_bytes: int | None
    _hard_limit: int = resource.RLIM_INFINITY  # only root may raise it
    _data_at_start: int = 0
    _anon_at_start: int = 0
    _peak_data: int = 0
    _mapped_at_start: MappedBytes | None = None

    def start(self) -> None:
        """Reset the kernel's high-water mark and set the limit. Raises OSError if the shell's own limit is lower."""
        with contextlib.suppress(OSError):  # an older kernel: the mark then includes the zygote's peak
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM := VmRSS
        now = status_bytes("VmData", "RssAnon")
        self._data_at_start, self._anon_at_start = now["VmData"], now["RssAnon"]
        self._mapped_at_start = read_mapped_bytes()
        if self.limit_bytes is not None:
            self._hard_limit = hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            budget = now["VmData"] + self.limit_bytes
            if hard != resource.RLIM_INFINITY and budget > hard:
                raise OSError(f"ulimit -Hd lets a process hold {format_bytes(hard)}: {format_bytes(budget)} are needed")
            resource.setrlimit(resource.RLIMIT_DATA, (budget, hard))

    def lift(self) -> None:
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

    def free_bytes(self) -> int | None:
        if self.limit_bytes is None:
            return None
        now = status_bytes("VmData")["VmData"] - self._data_at_start
        # Before an exception is caught, the objects under construction are freed: only the high-water mark has them.
        return max(0, self.limit_bytes - max(now, self.peaks()["device"] or 0))

    def begin_steps(self) -> None:
        """Malloc does not count retries."""

    def leave_device(self) -> dict[str, int]:
        """Lift the limit: a checkpoint passes through host memory, which is no part of a device's budget."""
        peak = self.peaks()["device"] or 0
        self.lift()
        return {"device": peak}

    def allocator(self) -> dict[str, int]:
        return {}

    def synchronize(self) -> None:
        """Return at once: CPU operators are done when they return."""

    def _peak_mapped(self, data_bytes: int) -> int:
        """Return malloc's own high-water mark plus the growth of other private memory (the heap, Python's arenas)."""
        before, after = self._mapped_at_start, read_mapped_bytes()
        if before is None or after is None or after.most_bytes <= before.most_bytes:
            return 0  # the zygote once held more than this trial: the other two marks must do
        grown = data_bytes - self._data_at_start
        return after.most_bytes - before.now_bytes + grown - (after.now_bytes - before.now_bytes)


def status_bytes(*names: str) -> dict[str, int]:
    """Return fields of /proc/self/status that are given in kB, in bytes; fields that it lacks are left out."""
    values = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in names:
            values[name] = int(value.split()[0]) * 1024
    return values


@dataclass(frozen=True, slots=True)
class MappedBytes:
    """Bytes that malloc holds in mappings of their own: now, and at most since the process (or its parent) began."""

    now_bytes: int
    most_bytes: int


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def read_mapped_bytes() -> MappedBytes | None:
    """Ask malloc for its mapped bytes; None if the C library is not glibc 2.33 or later."""
    try:
        mallinfo = _LIBC.mallinfo2
        malloc_stats = _LIBC.malloc_stats
    except AttributeError:
        return None
    mallinfo.restype = _MallocInfo
    most = _MAX_MMAP.search(_capture_stderr(malloc_stats))
    return MappedBytes(now_bytes=int(mallinfo().hblkhd), most_bytes=int(most[1])) if most else None


def _capture_stderr(function: object) -> bytes:
    """Return the text that a C function writes to file descriptor 2, the only output of malloc_stats."""
    assert callable(function)
    sys.stderr.flush()
    memory, before = os.memfd_create("malloc_stats"), os.dup(2)
    try:
        os.dup2(memory, 2)
        function()
    finally:
        os.dup2(before, 2)
        os.close(before)
    size = os.lseek(memory, 0, os.SEEK_CUR)
    text = os.pread(memory, size, 0)
    os.close(memory)
    return text
