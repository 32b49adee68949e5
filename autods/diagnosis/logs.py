"""Open logs: files, folders of them, gzip, pipes and standard input, as blocks of UTF-8.

A log may have any size. A pipe is waited for, and a line says so.
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..files import check_path, describe_file_kind, open_without_waiting
from ..units import format_bytes
from .lines import BLOCK_BYTES

MOST_FILES = 10_000  # in a folder
_GIVE_LOG = "give the log of the run"
STDIN = "standard input"
_GZIP = b"\x1f\x8b"  # first bytes
_GZIP_BITS = 31  # zlib: expect the header and the checksum of gzip
SILENT_S = 5.0  # after so long a line says that a pipe is waited for
AGAIN_S = 30.0  # between two lines
MOST_SILENT_S = 600.0  # a named pipe is given up

Listen = Callable[[str], None]


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


def read_blocks(log: Log, listen: Listen) -> Iterator[bytes]:
    """Yield the log's text as blocks of UTF-8. gzip and UTF-16 are read too.

    Raises InputError if it cannot be read.
    """
    try:
        with _open(log) as file:
            raw = _read(file, log, listen)
            start = b""
            while len(start) < len(_GZIP) and (block := next(raw, b"")):
                start += block  # a pipe may hold a single byte
            blocks: Iterator[bytes] = itertools.chain((start,), raw)
            if start.startswith(_GZIP):
                blocks = _unpack(blocks, log)
            first = next(blocks, b"")
            is_utf_16 = first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            decoder = codecs.getincrementaldecoder("utf-16")(errors="replace")
            for block in itertools.chain((first,), blocks):
                yield decoder.decode(block).encode(errors="replace") if is_utf_16 else block
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"cannot be read: {reason}", place=log.place, hint=_GIVE_LOG) from None


@contextlib.contextmanager
def _open(log: Log) -> Iterator[Any]:
    """Open the log as a binary file. Raises InputError for what has no end or is no log."""
    if log.path is None:
        if sys.stdin is None:
            raise InputError(f"{STDIN} is closed", place="-", hint="pipe a log into it, or name the file")
        yield sys.stdin.buffer
        return
    state = os.stat(log.path)
    kind = describe_file_kind(state.st_mode)
    is_null = stat.S_ISCHR(state.st_mode) and state.st_rdev == os.stat(os.devnull).st_rdev
    if kind not in (None, "pipe") and not is_null:
        raise InputError(f"cannot be read: it is a {kind}, not a log", place=log.place, hint=_GIVE_LOG)
    with open(log.path, "rb", opener=open_without_waiting) as file:
        with contextlib.suppress(OSError):  # a log that was truncated while a run wrote it begins with a hole
            file.seek(0, os.SEEK_DATA)
        yield file


def _read(file: Any, log: Log, listen: Listen) -> Iterator[bytes]:
    """Yield what there is to read. A pipe is waited for; a regular file makes nobody wait."""
    count, last_line_s = 0, time.monotonic()
    while True:
        _wait(file, log, listen)
        if not (block := file.read1(BLOCK_BYTES)):
            return
        count += len(block)
        yield block
        if time.monotonic() - last_line_s > AGAIN_S:
            last_line_s = time.monotonic()
            listen(f"reading {log.place}: {format_bytes(count)} so far (Ctrl-C ends it)")


def _wait(file: Any, log: Log, listen: Listen) -> None:
    """Return when there is something to read, or the end. A run may be silent for long, and would die with its pipe."""
    poll, began_s, wait_s = select.poll(), time.monotonic(), SILENT_S
    try:
        poll.register(file.fileno(), select.POLLIN)
    except OSError:  # a stream of the program's own in the place of standard input
        return
    while not poll.poll(wait_s * 1000):
        silent_s, wait_s = time.monotonic() - began_s, AGAIN_S
        if log.path is not None and silent_s >= MOST_SILENT_S:
            problem = f"nothing came from this pipe for {silent_s:.0f} s"
            raise InputError(problem, place=log.place, hint="write the log into a file, and give that")
        why = "type or paste a log, and end it with Ctrl-D" if file.isatty() else "its other end has sent nothing"
        listen(f"waiting for {log.place}: {why} (Ctrl-C ends it)")


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
