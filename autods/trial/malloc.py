"""glibc's malloc in this process: the high-water mark of its mapped memory, and how it gives memory back.

With MALLOC_MMAP_THRESHOLD_ at 64 KiB every tensor of some size is a mapping of its own, so this mark is the exact peak
of tensor memory, touched or not. The kernel keeps no mark of VmData, and its VmHWM misses what was never written.
That has its price: each tensor comes as untouched pages. Left alone malloc keeps up to 64 MiB at the end of its heap,
and what is smaller than 32 MiB comes from there once the program has freed something as large.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

_LIBC = ctypes.CDLL(None)
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # `M_MMAP_THRESHOLD` and the other of malloc.h
_THP_DISABLE = 41  # `PR_SET_THP_DISABLE` of linux/prctl.h
HUGE_PAGES_AT = Path("/sys/kernel/mm/transparent_hugepage/enabled")
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


def let_alone() -> None:
    """From here on memory comes and goes as in a process that nobody told anything: as far as malloc's own thresholds
    would have risen by now (malloc.c, glibc 2.26 and later), and in huge pages only where everything is."""
    _LIBC.mallopt(_MMAP_THRESHOLD, 32 * 2**20)
    _LIBC.mallopt(_TRIM_THRESHOLD, 64 * 2**20)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        if "[always]" not in HUGE_PAGES_AT.read_text():
            _LIBC.prctl(_THP_DISABLE, 1, 0, 0, 0)


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
