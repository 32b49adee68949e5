"""What glibc's malloc knows of this process: above all the high-water mark of its mapped memory.

With MALLOC_MMAP_THRESHOLD_ at 64 KiB every tensor of some size is a mapping of its own, so this mark is the exact peak
of tensor memory, touched or not. The kernel keeps no mark of VmData, and its VmHWM misses what was never written.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from dataclasses import dataclass

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
