"""Skip the lines of a log that cannot tell anything, before they are parsed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

from .rules import rows

# Words that tracebacks, launchers and shells use. The rows of `signatures/` add their own.
_STRUCTURE = (
    "traceback", "error", "exception", "fail", "fatal", "critical", "abort", "crash", "panic", "interrupt", "timeout",
    "fault", "unsupported", "notfound", "mismatch", "outofmemory", "outofresources", "denied", "abandoned",
    "exit", "signal", "sigkill", "sigterm", "sigseg", "sigbus", "sigabrt", "sigill", "sigfpe", "sighup", "sigint",
    "return code", "killed", "terminat", "hangup", "illegal", "root cause",
    "pid", "local_rank", "world_rank", "rankid", "nnodes", "num_machines", "world info",
)  # fmt: skip
_HEAD_CHARS = 160  # of a line: compared where lines differ in more than digits
_MOST_REPEATS = 12  # lines that differ only in their digits are kept this often
_MOST_RANK_LINES = 4000  # lines that say which process has which rank are kept this often
_MOST_SHAPES = 100_000
_MANY = 4000  # kept lines from which on likeness is judged more coarsely
_MOST_ALIKE = 200
_HEX_DIGITS = b"0123456789abcdefABCDEF"


class LineFilter:
    """Decides line by line for one file. It counts the lines it has seen, so that it can drop repetitions."""

    def __init__(self) -> None:
        self._shapes: Counter[int] = Counter()
        self._word_sets: Counter[frozenset[bytes]] = Counter()
        self._kept = 0

    def keeps(self, raw: bytes, lowered: bytes) -> bool:
        """Whether the line has a word that some row looks for and is no repetition. lowered: the line in lower case.

        Lines that differ only in their digits are repetitions. After `_MANY` kept lines those with the same words,
        or the same text but for hexadecimal digits, count as repetitions too.
        """
        if len(self._shapes) > _MOST_SHAPES:
            self._shapes.clear()
        count = self._count(raw.translate(None, b"0123456789"))
        if count > _MOST_REPEATS and (count > _MOST_RANK_LINES or b"pid" not in lowered or b"rank" not in lowered):
            return False
        if self._kept < _MANY:
            keep = _telling_words().search(lowered) is not None
            self._kept += keep
            return keep
        if self._count(raw[:_HEAD_CHARS].translate(None, _HEX_DIGITS)) > _MOST_ALIKE:
            return False
        words = frozenset(_telling_words().findall(lowered))
        self._word_sets[words] += 1
        return bool(words) and self._word_sets[words] <= _MOST_ALIKE

    def _count(self, shape: bytes) -> int:
        key = hash(shape)
        self._shapes[key] += 1
        return self._shapes[key]


@cache
def _telling_words() -> re.Pattern[bytes]:
    words = {word for row in rows() for word in row.says} | set(_STRUCTURE)
    return re.compile(_any_of(words).encode())


def _any_of(words: Iterable[str]) -> str:
    """A regular expression that matches the shortest of the words at a place.

    Words share their beginnings as in a trie: for a thousand words that is about ten times as fast as `in` for each.
    """
    trie: dict[str, Any] = {}
    for word in words:
        node = trie
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return _pattern_of(trie)


def _pattern_of(node: dict[str, Any]) -> str:
    if "" in node:
        return ""
    branches = [re.escape(character) + _pattern_of(rest) for character, rest in sorted(node.items())]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
