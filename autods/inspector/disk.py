"""Measure a folder for NVMe offload: free space, and the bandwidth of direct I/O."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..report.results.doctor import Check
from ..units import format_bytes

_BLOCK_BYTES = 8 * 2**20
_FILE_BYTES = 512 * 2**20
_SLOW_BYTES_S = 10**9  # an NVMe disk reads 3 GB/s and more; a trial on a slower one takes minutes a step
_IN_MEMORY = ("tmpfs", "ramfs")
_NO_DIRECT_IO = (errno.EINVAL, errno.EOPNOTSUPP)


def find_file_system(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the file system that a folder is on, such as 'ext4'; '' where the kernel does not tell."""
    with contextlib.suppress(OSError):
        device = os.stat(folder).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        for line in mounts.read_text(errors="replace").splitlines():
            place, _, kind = line.partition(" - ")  # '36 35 98:0 /a /mnt rw … - ext4 /dev/sda rw'
            if place.split()[2] == number:
                return kind.split()[0]
    return ""


def find_memory_folder(folder: Path, file_system: Callable[[Path], str] = find_file_system) -> Check | None:
    """Return a check that is broken where the folder is in host memory, such as /dev/shm; None for one on a disk.

    Since Linux 6.6 tmpfs accepts direct I/O, so that neither a trial nor a measurement shows it.
    """
    if (kind := file_system(folder)) not in _IN_MEMORY:
        return None
    result = f"it is host memory ({kind}), so offloading to it saves none"
    return Check.broken("NVMe", str(folder), result, "name a folder on a local disk")


def check_nvme(
    folder: Path, *, file_bytes: int = _FILE_BYTES, file_system: Callable[[Path], str] = find_file_system
) -> Iterator[Check]:
    """Free space of the folder, and how fast it is written and read past the page cache."""
    if folder.exists() and not folder.is_dir():
        yield Check.broken("NVMe", str(folder), "it is a file", "name a folder on the disk")
        return
    if not folder.is_dir():
        yield Check.broken("NVMe", str(folder), "there is no such folder", f"mkdir -p {folder}")
        return
    if (check := find_memory_folder(folder, file_system)) is not None:
        yield check
        return
    free = shutil.disk_usage(folder).free
    if free < 2 * file_bytes:
        yield Check.broken("NVMe", str(folder), f"{format_bytes(free)} free", "make room, or name another folder")
        return
    yield Check.ok("NVMe", str(folder), f"{format_bytes(free)} free")
    try:
        written, read = measure_bandwidth(folder, file_bytes)
    except OSError as error:
        if error.errno in _NO_DIRECT_IO:
            result, remedy = f"direct I/O fails: {error.strerror}", "take a local disk: not all file systems have it"
        else:
            result, remedy = f"it cannot be measured: {error.strerror}", f"make {folder} writable, or name another one"
        yield Check.broken("NVMe", "bandwidth", result, remedy)
        return
    speeds = f"writes {format_bytes(int(written))}/s, reads {format_bytes(int(read))}/s"
    result = f"{speeds} (direct I/O, {format_bytes(file_bytes)})"
    if min(written, read) < _SLOW_BYTES_S:
        remedy = "a step moves all optimizer states: name a faster disk"
        yield Check.warning("NVMe", "bandwidth", result, remedy)
    else:
        yield Check.ok("NVMe", "bandwidth", result)


def measure_bandwidth(folder: Path, file_bytes: int) -> tuple[float, float]:
    """Write and read a file in large blocks past the page cache; return bytes a second of each.

    Raises OSError where the file system has no direct I/O. The file is gone when this returns.
    """
    descriptor, path = tempfile.mkstemp(dir=folder, prefix=".autods-bandwidth-")
    os.close(descriptor)
    blocks = file_bytes // _BLOCK_BYTES
    try:
        with mmap.mmap(-1, _BLOCK_BYTES) as block, _open_direct(path) as file:  # mapped memory is aligned to pages
            block.write(os.urandom(4096) * (_BLOCK_BYTES // 4096))
            began = time.monotonic()
            for _ in range(blocks):
                os.write(file, block)
            os.fsync(file)
            written_s = time.monotonic() - began
            os.lseek(file, 0, os.SEEK_SET)
            began = time.monotonic()
            for _ in range(blocks):
                os.readv(file, [block])
            read_s = time.monotonic() - began
    finally:
        os.unlink(path)
    size = blocks * _BLOCK_BYTES
    return size / written_s, size / read_s


@contextlib.contextmanager
def _open_direct(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
