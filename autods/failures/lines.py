"""A log as lines worth reading: streamed, bounded, cleaned, each with the rank and stream that its prefix names.

Most of a log is training progress. Only lines that the sieve keeps, or that an open traceback wants, are taken apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from .clock import SPAN, Clock, clock_of
from .prefix import Prefix, joined, split_prefix
from .records import record_of
from .sieve import Sieve

BLOCK_BYTES = 1 << 20
LINE_CHARS = 4000  # what is kept of a line: its beginning and its end
_UNBROKEN_BYTES = 1 << 16  # a line without an end is cut here
_MANY_PARTS = 40  # of one line: progress bars without a line end
_BACK_LINES = 200  # so far back a line's time is looked for
_WATCH_LINES = 3000  # lines after something that looks fatal, among which progress is counted

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[()][A-B0-2])")
PROGRESS = re.compile(
    r"(?:\bsteps?|\biter(?:ation)?s?|global_step|\bepochs?|num_updates)\W{0,6}(\d+)|(\d+)/\d+ ?\[\d"
    r"|\bloss['\"]?\s*[:=]\s*\d|\d\s?(?:it/s|s/it)\b",
    re.IGNORECASE,
)
_BAR = re.compile(r"\d+%\|[^|]{0,200}\| ?\S+ \[[^\]]{3,200}\]")  # tqdm's
# A file made of several: `tail -n 50 *.log`, or a header before each.
_HEADER = re.compile(
    rb"(?:={2,}>?|#{2,}|-{2,}|\*{2,}|>{2,})\s*(?:(?:file|log|output of|contents? of|stderr of|stdout of):? )?"
    rb"([^\s=]*?(?:(?:rank|worker|node|proc|task|trainer|gpu)[-_ ]?\d+[^\s=]*"
    rb"|[^\s=]+\.(?:log|out|err|txt|stderr|stdout)))\s*:?\s*"
    rb"(?:<?={2,}|#{2,}|-{2,}|\*{2,}|<{2,})?\s*$",
    re.IGNORECASE,
)
_HEADS = (b"==", b"##", b"--", b"**", b">>")


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
        self.parts: dict[str, int] = {}  # progress of each file that this one is made of
        self._name = file
        self._raws: list[bytes] = []
        self._first = 0
        self.last: list[str] = []  # of the last block
        self._watch_until = -1
        self._last_step = ""
        self._sieve = Sieve()

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

    def ended(self) -> dict[str, int]:
        """Training progress, per file that this one is made of."""
        return {**self.parts, self.file: self.progress}

    def when(self, number: int) -> Clock | None:
        """The time of a line just read: its own, or the last one before it."""
        here = number - self._first
        for raw in reversed(self._raws[max(0, here - _BACK_LINES) : here]):
            if found := clock_of(raw[: 2 * SPAN].decode(errors="replace")):
                return found
        return None

    def _block(self, block: bytes) -> Iterator[Line]:
        if block:
            self.last = [text for text in _clean(block[-2000:]).splitlines() if text.strip()][-5:]
        self._raws, self._first = block.split(b"\n"), self.number
        for raw, lowered in zip(self._raws, block.lower().split(b"\n"), strict=True):
            self.number += 1
            if raw[:2] in _HEADS and (header := _HEADER.match(raw)):
                self._begin(header[1].decode(errors="replace"))
            elif self.waiting() or self._sieve.keeps(raw, lowered):
                yield from self._lines(raw)
            elif self.number < self._watch_until:
                self._count(raw)
        self.number -= 1  # what follows the last line end is the next block's first line

    def _begin(self, name: str) -> None:
        """What follows is another file's."""
        self.parts[self.file] = self.progress
        self.file = f"{self._name}/{name}" if self._name else name
        self.progress, self._last_step = self.parts.get(self.file, 0), ""

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
        parts = _split(_clean(raw))
        for text in parts:
            if len(parts) > _MANY_PARTS and not self.waiting() and not self._sieve.keeps(*_both(text)):
                continue
            prefix, rest = split_prefix(text)
            if (bar := _BAR.search(rest)) and (
                said := rest[bar.end() :].strip()
            ):  # written after a bar without a line end
                inner, rest = split_prefix(said)
                prefix = joined(prefix, inner)
            if (rest[:2] == '{"' or "msg=" in rest) and (record := record_of(rest)):
                for part in record[1]:
                    yield Line(self.file, self.number, part, joined(prefix, record[0]), self.progress)
                    prefix, record = _bare(prefix), (_bare(record[0]), record[1])
                continue
            if len(rest) > LINE_CHARS:
                rest = f"{rest[: LINE_CHARS // 2]} … {rest[-LINE_CHARS // 2 :]}"
            yield Line(self.file, self.number, rest, prefix, self.progress)


def _both(text: str) -> tuple[bytes, bytes]:
    raw = text.encode(errors="replace")
    return raw, raw.lower()


def _bare(prefix: Prefix) -> Prefix:
    """Without time and level: the lines of one record belong together."""
    return replace(prefix, time="", level=None)


def _clean(raw: bytes) -> str:
    text = raw.decode("utf-8", errors="replace")
    return _ANSI.sub("", text) if "\x1b" in text else text


def _split(text: str) -> list[str]:
    """At carriage returns (progress bars), and at line ends that a JSON log wrote as backslash and n."""
    parts = [part for part in text.split("\r") if part.strip()] if "\r" in text else [text]
    if (
        "\\n" in text
        and not (len(parts) == 1 and text.rstrip().endswith("}"))
        and ("Traceback (most" in text or len(text) > LINE_CHARS)
    ):
        parts = [piece for part in parts for piece in part.split("\\n")]
    return parts
