"""Open logs: files, folders of them, gzip, pipes and standard input, as blocks of UTF-8 within bounds.

A log may have any size. A large one is read in part: its beginning, where a run starts, and its end.
A pipe is waited for, and a line says so.
"""

from __future__ import annotations

import codecs
import contextlib
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
from pathlib import Path

from ..errors import InputError
from ..files import check_path, describe_file_kind
from ..units import format_bytes
from .lines import BLOCK_BYTES

FIRST_BYTES = 2**29  # of a larger log: of the part at its beginning, and of the part at its end
LAST_BYTES = 2**26
_MOST_STREAMED = 2**38  # bytes of a log
MOST_FILES = 10_000  # in a folder
_GIVE_LOG = "give the log of the run"
STDIN = "standard input"
_GZIP = b"\x1f\x8b"  # first bytes
_GZIP_BITS = 31  # zlib: expect the header and the checksum of gzip

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
    """Yield the log's text as blocks of UTF-8. gzip and UTF-16 are read too.

    Raises InputError if it cannot be read.
    """
    try:
        with _open(log) as descriptor:
            raw = _read_replaced_stdin() if descriptor is None else _read(descriptor, log, listen, waits)
            start = b""
            while len(start) < len(_GZIP) and (block := next(raw, b"")):
                start += block  # a pipe may hold a single byte
            is_file = descriptor is not None and stat.S_ISREG(os.fstat(descriptor).st_mode)
            raw = itertools.chain((start,), raw)
            if start.startswith(_GZIP):
                blocks = _keep_ends(_unpack(raw, log), log)
            else:
                blocks = _keep_ends(raw, log, descriptor if is_file else None)
            first = next(blocks, b"")
            is_utf_16 = first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            decoder = codecs.getincrementaldecoder("utf-16")(errors="replace")
            for block in itertools.chain((first,), blocks):
                yield decoder.decode(block).encode(errors="replace") if is_utf_16 else block
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"cannot be read: {reason}", place=log.place, hint=_GIVE_LOG) from None


@contextlib.contextmanager
def _open(log: Log) -> Iterator[int | None]:
    """Open the log's descriptor; None where a program has put another stream in the place of standard input.

    Raises InputError for what has no end or is no log.
    """
    if log.path is None:
        if sys.stdin is None:
            raise InputError(f"{STDIN} is closed", place="-", hint="pipe a log into it, or name the file")
        try:
            descriptor = sys.stdin.fileno()
        except OSError:
            descriptor = None
        yield descriptor
        return
    state = os.stat(log.path)
    kind = describe_file_kind(state.st_mode)
    is_null = stat.S_ISCHR(state.st_mode) and state.st_rdev == os.stat(os.devnull).st_rdev
    if kind not in (None, "pipe") and not is_null:
        raise InputError(f"cannot be read: it is a {kind}, not a log", place=log.place, hint=_GIVE_LOG)
    descriptor = os.open(log.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a log that was truncated while a run wrote it begins with a hole
        os.lseek(descriptor, 0, os.SEEK_DATA)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read_replaced_stdin() -> Iterator[bytes]:
    while block := sys.stdin.buffer.read(BLOCK_BYTES):
        yield block


def _read(descriptor: int, log: Log, listen: Listen, waits: Waits) -> Iterator[bytes]:
    """Yield what there is to read. A pipe is waited for; a regular file makes nobody wait."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    count, last_line_s = 0, time.monotonic()
    while True:
        _wait(poll, descriptor, count, log, listen, waits)
        try:
            block = os.read(descriptor, BLOCK_BYTES)
        except BlockingIOError:  # another program reads from this pipe, too
            continue
        if not block:
            return
        count += len(block)
        yield block
        if time.monotonic() - last_line_s > waits.again_s:
            last_line_s = time.monotonic()
            listen(f"reading {log.place}: {format_bytes(count)} so far (Ctrl-C ends it)")


def _wait(poll: select.poll, descriptor: int, count: int, log: Log, listen: Listen, waits: Waits) -> None:
    """Return when there is something to read, or the end. `count` bytes were read before."""
    began_s, next_line_s = time.monotonic(), waits.silent_s
    is_unopened = not count and stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    limit_s = waits.writer_s if is_unopened else waits.most_s
    while not poll.poll(max(0.0, began_s + next_line_s - time.monotonic()) * 1000):
        silent_s = time.monotonic() - began_s
        why = f"its other end has sent nothing {'more' if count else 'yet'}"
        if os.isatty(descriptor):
            why = "it is the terminal; type or paste a log, and end it with Ctrl-D"
        next_line_s = silent_s + waits.again_s
        if log.path is None:  # a run may be silent for long, and would die with this pipe
            listen(f"waiting for {STDIN}: {why} (Ctrl-C ends it)")
        elif silent_s < limit_s:
            listen(f"waiting for {log.place}: {why}, for {limit_s:.0f} s at most")
            next_line_s = min(next_line_s, limit_s)
        else:
            problem = f"nothing came from this pipe for {silent_s:.0f} s"
            raise InputError(problem, place=log.place, hint="write the log into a file, and give that")


def _unpack(blocks: Iterator[bytes], log: Log) -> Iterator[bytes]:
    """Yield the content of gzip. What follows damage, or was cut off, is missing; `notes` says so."""
    unpacker, count, problem = zlib.decompressobj(_GZIP_BITS), 0, ""
    try:
        for packed in blocks:
            while packed:
                if unpacker.eof:  # another member follows, as gzip appends it
                    unpacker = zlib.decompressobj(_GZIP_BITS)
                block = unpacker.decompress(packed, BLOCK_BYTES)
                packed = unpacker.unconsumed_tail or unpacker.unused_data
                count += len(block)
                yield block
    except zlib.error:
        problem = "is damaged"
    if not problem and not unpacker.eof:
        problem = "is cut off"
    if problem and not count:
        raise InputError(f"{problem}, so nothing of this packed log can be read", place=log.place)
    if problem:
        log.notes.append(f"{log.place} {problem}: the first {format_bytes(count)} of its text were read")


def _keep_ends(blocks: Iterator[bytes], log: Log, descriptor: int | None = None) -> Iterator[bytes]:
    """Yield the first part of a log as it comes, then the last blocks of it.

    `descriptor` is that of a file whose middle can be skipped; otherwise the middle is read and dropped.
    """
    size = 0
    for block in blocks:
        size += len(block)
        yield block
        if size >= FIRST_BYTES:
            break
    last, kept, end = deque[bytes](), 0, size
    if descriptor is not None:
        here, file_bytes = os.lseek(descriptor, 0, os.SEEK_CUR), os.fstat(descriptor).st_size
        even = max(here, file_bytes - LAST_BYTES) // 2 * 2  # between two characters of UTF-16
        end += os.lseek(descriptor, even, os.SEEK_SET) - here
    for block in blocks:
        last.append(block)
        kept += len(block)
        end += len(block)
        while kept - len(last[0]) >= LAST_BYTES:
            kept -= len(last.popleft())
        if end >= _MOST_STREAMED:
            break
    if end - size > kept:
        parts = f"its first {format_bytes(size)} and its last {format_bytes(kept)} were read"
        log.notes.append(f"{log.place} has {format_bytes(end)}: {parts}, and lines are counted of these")
    yield from last
