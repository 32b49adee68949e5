"""A log as lines worth reading: streamed, bounded, cleaned, each with the rank and stream that its prefix names.

Most of a log is training progress. A block of it is looked at as a whole first, and only lines that hold one of `WORDS`
(or that belong to an open traceback) are taken apart.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from .prefix import Prefix, split_prefix

# A line without any of these is neither a failure nor the end of a run; a test holds every signature's example to it.
_WORDS = """
error, exception, traceback, fail, memory, kill, signal, abort, fault, fatal, oom, quota, cannot, can't, couldn't,
unable, unavailable, timeout, timed, terminat, exit, died, dead, crash, assert, panic, refused, reset, closed,
mismatch, invalid, unsupported, supported, missing, denied, xid, ecc, preempt, cancel, limit, interrupt, evict,
bad_alloc, sigterm, dumped, undefined, incompat, require, unrecognized, unexpected, unhandled, insufficient,
exhaust, lost, stuck, warn, train_runtime, success, complete, finish, stopped, flushes, alloc, retries, root cause,
local_rank, return code, too many, too long, not found, no such, no space, not equal, not match, is not, must be,
expected , out of , nan , overflow, illegal, percent =, errno, corrupt, truncated, unreachable, hang, desync,
stale, broken, exceed, rejected, plugin, low on, bytes !=, nbytes, aio , nccl, wrong, struct, override, ssh, key,
ei00, skipping, slurm, file too, disconnect, halt, reboot, shutting, gave up, giving up, suspend, exceptio
"""
WORDS = tuple(word.encode() for word in " ".join(_WORDS.split("\n")).strip().split(", "))

BLOCK_BYTES = 1 << 20
LINE_CHARS = 4000  # what is kept of a line: its beginning and its end
_UNBROKEN_BYTES = 1 << 16  # a line without an end is cut here
_REPEATS = 12  # lines that differ only in their digits are read this often
_SHAPES = 100_000
_WATCH_LINES = 3000  # lines after something that looks fatal, among which progress is counted

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[()][A-B0-2])")
PROGRESS = re.compile(
    r"(?:\bsteps?|\biter(?:ation)?s?|global_step|\bepochs?|num_updates)\W{0,6}(\d+)|(\d+)/\d+ ?\[\d"
    r"|\bloss['\"]?\s*[:=]\s*\d|\d\s?(?:it/s|s/it)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Line:
    """One line without its prefix. progress: how much training progress its file had shown since it looked fatal."""

    file: str
    number: int
    text: str
    prefix: Prefix
    progress: int = 0


class Reader:
    """The lines of one file that are worth reading. `waiting` says whether a traceback is open and needs all lines."""

    def __init__(self, file: str, waiting: Callable[[], bool] = lambda: False) -> None:
        self.file, self.waiting = file, waiting
        self.number = 0
        self.bytes = 0
        self.progress = 0
        self.last: list[str] = []  # of the last block
        self._watch_until = -1
        self._last_step = ""
        self._shapes: Counter[bytes] = Counter()

    def read(self, blocks: Iterable[bytes]) -> Iterator[Line]:
        """Lines, in order. blocks: the file's bytes (UTF-8) in pieces of any size."""
        rest = b""
        for block in blocks:
            self.bytes += len(block)
            whole, newline, rest = (rest + block).rpartition(b"\n")
            yield from self._block(whole + newline)
            while len(rest) > _UNBROKEN_BYTES:
                cut, rest = rest[:_UNBROKEN_BYTES], rest[_UNBROKEN_BYTES:]
                yield from self._block(cut)
        if rest:
            yield from self._block(rest + b"\n")

    def watch(self) -> None:
        """Something looks fatal: count the progress that follows, for a run that trains on has not died."""
        self._watch_until = self.number + _WATCH_LINES

    def _block(self, block: bytes) -> Iterator[Line]:
        low = block.lower()
        words = [word for word in WORDS if word in low]
        if block:
            self.last = [text for text in _clean(block[-2000:]).splitlines() if text.strip()][-5:]
        if not words and not self.waiting() and self.number >= self._watch_until:
            self.number += block.count(b"\n")
            return
        for raw, lowered in zip(block.split(b"\n"), low.split(b"\n"), strict=True):
            self.number += 1
            if self.waiting() or any(word in lowered for word in words):
                if not self.waiting() and self._seen_enough(raw):
                    continue
                yield from self._lines(raw)
            elif self.number < self._watch_until:
                self._count(raw)
        self.number -= 1  # what follows the last line end is the next block's first line

    def _seen_enough(self, raw: bytes) -> bool:
        shape = raw.translate(None, b"0123456789")
        if len(self._shapes) > _SHAPES:
            self._shapes.clear()
        self._shapes[shape] += 1
        return self._shapes[shape] > _REPEATS

    def _count(self, raw: bytes) -> None:
        found = PROGRESS.search(raw.decode(errors="replace"))
        if found is None:
            return
        step = found[1] or found[2] or ""
        if not step or step != self._last_step:  # eight ranks that tell the same step are one step
            self.progress += 1
            self._last_step = step

    def _lines(self, raw: bytes) -> Iterator[Line]:
        if self.number < self._watch_until:
            self._count(raw)
        for text in _split(_clean(raw)):
            if len(text) > LINE_CHARS:
                text = f"{text[: LINE_CHARS // 2]} … {text[-LINE_CHARS // 2 :]}"
            prefix, rest = split_prefix(text)
            yield Line(self.file, self.number, rest, prefix, self.progress)


def _clean(raw: bytes) -> str:
    text = raw.decode("utf-8", errors="replace")
    return _ANSI.sub("", text) if "\x1b" in text else text


def _split(text: str) -> list[str]:
    """At carriage returns (progress bars), and at line ends that a JSON log wrote as backslash and n."""
    parts = [part for part in text.split("\r") if part.strip()] if "\r" in text else [text]
    if "\\n" in text and ("Traceback (most" in text or len(text) > LINE_CHARS):
        parts = [piece for part in parts for piece in part.split("\\n")]
    return parts
