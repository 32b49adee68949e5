"""Open logs: files, folders of them, compressed ones, pipes and standard input, as blocks of UTF-8 within bounds.

A log may have any size. A large one is read in part: its beginning, where a run starts, and its end.
A pipe is waited for, and a line says so.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import itertools
import os
import select
import stat
import sys
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..files import check_path, describe_file_kind
from ..units import format_bytes
from .lines import BLOCK_BYTES

PART_BYTES = 256 * 2**20  # of the first and of the last part of a larger log
_KEPT_BYTES = 64 * 2**20  # of the last part of a log without positions: a pipe, gzip
_MOST_STREAMED = 2**38  # bytes of a log without positions
MOST_FILES = 10_000  # in a folder
_GIVE_LOG = "give the log of the run"
STDIN = "standard input"
# First bytes of a packed log → the module of the standard library that reads it.
_PACKINGS = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\0": "lzma", b"\x5d\0\0": "lzma"}
_MOST_FIRST_BYTES = 6

Listen = Callable[[str], None]


@dataclass(slots=True)
class Waits:
    """Seconds of the waits for a pipe. After `silent_s` a line says what is waited for, and again each `again_s`.

    A pipe that no program has opened is given up after `writer_s`, another one after `most_s` without a byte.
    """

    silent_s: float = 5.0
    again_s: float = 30.0
    writer_s: float = 30.0
    most_s: float = 600.0


@dataclass(slots=True)
class Log:
    """A log that was not read yet. After `read_blocks`, `notes` has sentences about what of it was not read.

    `name` stands before the line in 'train.log:4'. It is empty for standard input that is the only log.
    """

    name: str
    path: Path | None  # None: standard input
    notes: list[str] = field(default_factory=list)

    @property
    def place(self) -> str:
        return STDIN if self.path is None else str(self.path)


def find_logs(paths: Iterable[str | os.PathLike[str]], *, stdin: bool = False) -> list[Log]:
    """Return every log in the given files and folders once. With `stdin`, '-' is standard input.

    The name of a log is its file's, or its path below the given folder. Where several have the same, as in
    'node0/train.log' and 'node1/train.log', the folders above come before it.
    Raises InputError for a path where there is no file.
    """
    logs: dict[str, Log] = {}  # by absolute path
    for given in paths:
        check_path(given, "a log")
        path = Path(given)
        if stdin and str(path) == "-":
            logs["-"] = Log(name="", path=None)
            continue
        if os.path.isdir(path):
            for file in _list_folder(path):
                logs.setdefault(os.path.abspath(file), Log(name=str(file.relative_to(path)), path=file))
            continue
        if not os.path.lexists(path):
            raise InputError("no such file", place=str(path), hint=f"{_GIVE_LOG}, or a folder of logs")
        logs.setdefault(os.path.abspath(path), Log(name=path.name, path=path))
    if len(logs) > 1 and "-" in logs:
        logs["-"].name = STDIN
    _name_by_folder(logs)
    return list(logs.values())


def _name_by_folder(logs: Mapping[str, Log]) -> None:
    """Lengthen the names that several logs share, by as many folders of their absolute paths as tell them apart."""
    while shared := {name for name, count in Counter(log.name for log in logs.values()).items() if count > 1}:
        for path, log in logs.items():
            if log.name in shared:
                log.name = str(Path(*Path(path).parts[-len(Path(log.name).parts) - 1 :]))


def _list_folder(folder: Path) -> list[Path]:
    """Return the regular files below a folder whose names begin with no dot; links to folders are not followed."""
    files: list[Path] = []
    problems: list[OSError] = []
    for parent, _, names in os.walk(folder, onerror=problems.append):
        paths = (Path(parent, name) for name in names if not name.startswith("."))
        files += (path for path in paths if os.path.isfile(path))
        if len(files) > MOST_FILES:
            problem = f"the folder has more than {MOST_FILES:,} files"
            raise InputError(problem, place=str(folder), hint="give the logs of one run")
    if not files and problems:
        raise InputError(f"cannot be read: {problems[0].strerror}", place=str(problems[0].filename), hint=_GIVE_LOG)
    if not files:
        raise InputError("the folder has no files", place=str(folder), hint=_GIVE_LOG)
    return sorted(files)


def read_blocks(log: Log, listen: Listen, waits: Waits) -> Iterator[bytes]:
    """Yield the log's text as blocks of UTF-8. gzip, bzip2, xz and UTF-16 are read too.

    Raises InputError if it cannot be read.
    """
    try:
        with _open(log, listen, waits) as source, io.BufferedReader(source, BLOCK_BYTES) as stream:
            start = stream.peek(_MOST_FIRST_BYTES)
            packing = next((packing for magic, packing in _PACKINGS.items() if start.startswith(magic)), None)
            if packing is not None:
                blocks = _keep_ends(_unpack(stream, log, packing), log)
            elif source.is_file:
                blocks = _skip_middle(source, stream, log)
            else:
                blocks = _keep_ends(_read_plain(stream), log)
            first = next(blocks, b"")
            is_utf_16 = first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            decoder = codecs.getincrementaldecoder("utf-16")(errors="replace")
            for block in itertools.chain((first,), blocks):
                yield decoder.decode(block).encode(errors="replace") if is_utf_16 else block
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"cannot be read: {reason}", place=log.place, hint=_GIVE_LOG) from None


class _Source(io.RawIOBase):
    """The bytes of a log's file descriptor. It waits for pipes and says so; a regular file is never waited for."""

    def __init__(self, descriptor: int, log: Log, listen: Listen, waits: Waits) -> None:
        self.descriptor, self.log, self.listen, self.waits = descriptor, log, listen, waits
        mode = os.fstat(descriptor).st_mode
        self.is_file, self._is_pipe = stat.S_ISREG(mode), stat.S_ISFIFO(mode)
        self.bytes = 0
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        self._last_line_s = time.monotonic()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what there is: at the start enough to know a packed log, though a pipe may hold a single byte of it."""
        least, count = (0 if self.bytes else _MOST_FIRST_BYTES), 0
        while True:
            if not self.is_file:
                self._wait()
            with contextlib.suppress(BlockingIOError):  # another program reads from this pipe, too
                read = os.readv(self.descriptor, [memoryview(buffer)[count:]])
                count += read
                self.bytes += read
                if not read or count >= least:
                    break
        if time.monotonic() - self._last_line_s > self.waits.again_s:
            self._last_line_s = time.monotonic()
            self.listen(f"reading {self.log.place}: {format_bytes(self.bytes)} so far (Ctrl-C ends it)")
        return count

    def _wait(self) -> None:
        """Return when there is something to read, or the end."""
        began, waits = time.monotonic(), self.waits
        next_line_s = waits.silent_s
        limit_s = waits.most_s if self.bytes or not self._is_pipe else waits.writer_s
        while not self._poll.poll(max(0.0, next_line_s - (time.monotonic() - began)) * 1000):
            silent_s = time.monotonic() - began
            if self.log.path is None:  # a run may be silent for long, and would die with this pipe
                self.listen(f"waiting for {STDIN}: {self._describe_wait()} (Ctrl-C ends it)")
            elif silent_s >= limit_s:
                problem = f"nothing came from this pipe for {silent_s:.0f} s"
                raise InputError(problem, place=self.log.place, hint="write the log into a file, and give that")
            else:
                self.listen(f"waiting for {self.log.place}: {self._describe_wait()}, for {limit_s:.0f} s at most")
            next_line_s = silent_s + waits.again_s
            if self.log.path is not None:
                next_line_s = min(next_line_s, limit_s)
            self._last_line_s = time.monotonic()

    def _describe_wait(self) -> str:
        if os.isatty(self.descriptor):
            return "it is the terminal; type or paste a log, and end it with Ctrl-D"
        return "its other end has sent nothing more" if self.bytes else "its other end has sent nothing yet"

    def seekable(self) -> bool:
        return self.is_file

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return os.lseek(self.descriptor, offset, whence)

    def close(self) -> None:
        if not self.closed and self.log.path is not None:
            os.close(self.descriptor)
        super().close()


def _open(log: Log, listen: Listen, waits: Waits) -> _Source | _Stream:
    """Return the log's bytes. Raises InputError for what has no end or is no log."""
    if log.path is None:
        if sys.stdin is None:
            raise InputError(f"{STDIN} is closed", place="-", hint="pipe a log into it, or name the file")
        try:
            descriptor = sys.stdin.fileno()
        except OSError:  # a program has put another stream there
            return _Stream(sys.stdin.buffer)
        return _Source(descriptor, log, listen, waits)
    state = os.stat(log.path)
    kind = describe_file_kind(state.st_mode)
    is_null = stat.S_ISCHR(state.st_mode) and state.st_rdev == os.stat(os.devnull).st_rdev
    if kind not in (None, "pipe") and not is_null:
        raise InputError(f"cannot be read: it is a {kind}, not a log", place=log.place, hint=_GIVE_LOG)
    descriptor = os.open(log.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    return _Source(descriptor, log, listen, waits)


class _Stream(io.RawIOBase):
    """The bytes of a stream of Python's that is no file."""

    is_file = False

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _read_plain(stream: io.BufferedReader[Any]) -> Iterator[bytes]:
    while block := stream.read1(BLOCK_BYTES):
        yield block


def _unpack(source: io.BufferedReader[Any], log: Log, packing: str) -> Iterator[bytes]:
    """Yield the content. What follows damage, or was cut off, is missing; `notes` says so."""
    try:
        module = import_module(packing)
    except ImportError:
        problem = f"is packed, and this Python was built without {packing}"
        raise InputError(problem, place=log.place, hint="unpack it into autods diagnose -") from None
    damage = (EOFError, OSError, zlib.error, getattr(module, "LZMAError", EOFError))
    stream, count = module.open(source), 0
    try:
        while block := stream.read1(BLOCK_BYTES):
            count += len(block)
            yield block
    except damage as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk; that of the content has no number
            raise
        problem = "is cut off" if isinstance(error, EOFError) else "is damaged"
        if not count:
            raise InputError(f"{problem}, so nothing of this packed log can be read", place=log.place) from None
        log.notes.append(f"{log.place} {problem}: the first {format_bytes(count)} of its text were read")


def _skip_middle(source: _Source | _Stream, stream: io.BufferedReader[Any], log: Log) -> Iterator[bytes]:
    """Yield a regular file, of a large one its first and its last part."""
    assert isinstance(source, _Source)
    size, start = os.fstat(source.descriptor).st_size, 0
    with contextlib.suppress(OSError):  # a log that was truncated while a run wrote it begins with a hole
        start = os.lseek(source.descriptor, 0, os.SEEK_DATA) // 2 * 2
    stream.seek(start)
    last = (
        0 if size - start <= 2 * PART_BYTES else (size - PART_BYTES) // 2 * 2
    )  # even: between two characters of UTF-16
    yield from _take(_read_plain(stream), PART_BYTES if last else 2 * PART_BYTES)
    if last:
        log.notes.append(_describe_parts(log, size, PART_BYTES, size - last))
        stream.seek(last)
        yield from _take(_read_plain(stream), 2 * PART_BYTES)


def _take(blocks: Iterator[bytes], most: int) -> Iterator[bytes]:
    """Yield blocks up to about `most` bytes: a file may grow faster than it is read."""
    for block in blocks:
        yield block
        most -= len(block)
        if most <= 0:
            return


def _keep_ends(blocks: Iterator[bytes], log: Log) -> Iterator[bytes]:
    """Yield the first part of a log without positions as it comes, then the last blocks of it."""
    size = 0
    for block in blocks:
        size += len(block)
        yield block
        if size >= 2 * PART_BYTES:
            break
    last, kept, skipped = deque[bytes](), 0, size
    for block in blocks:
        last.append(block)
        kept += len(block)
        skipped += len(block)
        while kept - len(last[0]) >= _KEPT_BYTES:
            kept -= len(last.popleft())
        if skipped >= _MOST_STREAMED:
            break
    if skipped - size > kept:
        log.notes.append(_describe_parts(log, skipped, size, kept))
    yield from last


def _describe_parts(log: Log, size: int, first: int, last: int) -> str:
    parts = (
        f"its first {format_bytes(first)} and its last {format_bytes(last)} were read, and lines are counted of these"
    )
    return f"{log.place} has {format_bytes(size)}: {parts}"
