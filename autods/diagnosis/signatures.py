"""Signatures of failures: rows of data in `signatures/*.toml`, the most specific first."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

from ..schema import read_as
from ..types import Action, FailureKind, Tier

Kind = Literal["out_of_memory", "none"] | FailureKind

# The strength of a row as evidence. decisive: a kernel or scheduler reports what it ended. cause: the message names the
# cause. likely: it is the cause when no other message names one. secondary: the cause is in another process.
# weak: better than an exit code. pressure: memory was short and the run continued.
# stopped: a launcher ended its processes; it counts where no exit code does.
# benign: it only looks like a failure. done: the run ended well.
Weight = Literal["decisive", "cause", "likely", "secondary", "weak", "pressure", "stopped", "benign", "done"]
# Who says it. The user's own exceptions are matched by rows of `any` only.
Emitter = Literal["kernel", "driver", "scheduler", "launcher", "nccl", "torch", "deepspeed", "library", "any"]
# These never write through an exception of a type that only Python code raises.
_OUTSIDE_PYTHON = ("kernel", "driver", "scheduler", "launcher", "nccl")
_OF_PYTHON_CODE = frozenset((
    "ValueError", "KeyError", "TypeError", "AssertionError", "AttributeError", "NameError", "IndexError", "LookupError",
    "NotImplementedError", "UnboundLocalError", "ZeroDivisionError", "ImportError", "ModuleNotFoundError",
    "JSONDecodeError",
))  # fmt: skip
ERROR_LINE = "an error line"  # the "type" of a line that reports a failure without an exception
# Rows are tried in this order: a failure whose text looks like another class comes before that class.
FILES = (
    "benign", "not_memory", "ambiguous", "pinned", "shm", "disk", "device", "host", "pressure",
    "infrastructure", "config", "toolchain", "secondary", "communication", "user_code",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One row. It matches a message that has one of its phrases or the pattern, and for which all conditions hold.

    `phrases`: the text has one of them (lower case).
    `pattern`: a regular expression that matches the text. Where there are `words`, the text has one of them, too.
    `also`: a regular expression for the line that `pattern` matched.
    In the file `pattern`, `also`, `stack` and `unless` are lists of alternatives.
    The conditions:
    `emitter`: who says it. Another one's words in an exception of the user's own code are the user's.
    `types`: the exception has one of these names; "*" is any exception.
    `stack`: a regular expression that matches the traceback's frames.
    `unless`: one that must not match the text.

    `passing` rows also count on a line below level ERROR that only mentions the failure. A `budget` row means, in a
    process with a memory budget, that the budget is used up. A `killed` row reports that a process was killed. It
    counts as an OOM kill only if the node's memory shows one, where that is known. A `vanished` row reports that a
    process is gone, and not why: it counts as an OOM kill where the node's memory shows one.
    """

    name: str
    emitter: Emitter
    kind: Kind
    action: Action
    advice: str
    source: str
    tier: Tier | None = None
    weight: Weight = "cause"
    phrases: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    pattern: str = ""
    also: str = ""
    stack: str = ""
    unless: str = ""
    passing: bool = False
    budget: bool = False
    killed: bool = False
    vanished: bool = False
    file: str = ""

    def matches(self, text: str, lowered: str, type: str, stack: str) -> bool:
        """Whether the row matches, the user's authorship apart. `lowered` is the text in lower case."""
        if self.types and type not in self.types and not ("*" in self.types and type not in ("", ERROR_LINE)):
            return False
        if self.emitter in _OUTSIDE_PYTHON and type in _OF_PYTHON_CODE:
            return False
        if not (self._has_phrase(lowered) or self._has_pattern(text, lowered)):
            return False
        if self.stack and not _compiled(self.stack).search(stack):
            return False
        return not (self.unless and _compiled(self.unless).search(text))

    def tells(self, line: str) -> bool:
        """Whether the line has one of the row's phrases or words or, where there are none, matches the pattern."""
        if self.phrases or self.words:
            return any(word in line.lower() for word in (*self.phrases, *self.words))
        return bool(self.pattern) and _compiled(self.pattern).search(line) is not None

    def _has_phrase(self, lowered: str) -> bool:
        return any(phrase in lowered for phrase in self.phrases) or not (self.phrases or self.pattern)

    def _has_pattern(self, text: str, lowered: str) -> bool:
        if not self.pattern or (self.words and not any(word in lowered for word in self.words)):
            return False
        match = _compiled(self.pattern).search(text)
        if match is None or not self.also:
            return match is not None
        start, end = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end())
        return _compiled(self.also).search(text, start, len(text) if end < 0 else end) is not None


_FOLDER = Path(__file__).with_name("signatures")
_FRAGMENT = re.compile(r"\{([a-z_]+)\}")


def read_toml(name: str) -> dict[str, Any]:
    """Read one file of `signatures/`."""
    return tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


@cache
def _fragments() -> dict[str, str]:
    return {name: f"(?:{'|'.join(words)})" for name, words in read_toml("fragments").items()}


def expand(pattern: str) -> str:
    """Replace each {name} in a regular expression by the fragment of that name in `fragments.toml`."""
    return _FRAGMENT.sub(lambda match: _fragments()[match[1]], pattern)


@cache
def read_signatures() -> tuple[Signature, ...]:
    """All rows in the order in which they are tried. The values at a file's top hold for each of its rows."""
    signatures = []
    for file in FILES:
        shared = read_toml(file)
        for row in shared.pop("row"):
            values = {"file": file, **shared, **row}
            if values["kind"] != shared["kind"] and "tier" not in row:
                values["tier"] = None
            for name in ("pattern", "also", "stack", "unless"):
                values[name] = expand("|".join(values.get(name, ())))
            signatures.append(read_as(Signature, values))
    return tuple(signatures)


@cache
def _confidences() -> dict[str, float]:
    return {name: float(row["confidence"]) for name, row in read_toml("confidence").items()}


def find_confidence(grounds: str) -> float:
    """How often a verdict on such grounds is right: `confidence.toml`, which has the grounds."""
    return _confidences().get(grounds, _confidences()["other"])


@lru_cache(maxsize=1024)  # of a job that starts again and again, each end is in the log a thousand times
def find_signature(
    text: str, *, type: str = "", stack: str = "", passing: bool = False, by_user: bool = False
) -> Signature | None:
    """The first row that matches. With `passing` the line only mentions a failure, so only `passing` rows are tried.

    With `by_user` the user's own code raised it, so only rows of any emitter are tried.
    """
    lowered = text.lower()
    rows = (row for row in read_signatures() if (row.emitter == "any" or not by_user) and (row.passing or not passing))
    return next((row for row in rows if row.matches(text, lowered, type, stack)), None)


def any_of(words: Iterable[str]) -> str:
    """A regular expression that matches the shortest of the words at a place.

    Words share their beginnings as in a trie: for a thousand words that is about ten times as fast as `in` for each.
    """
    rests: dict[str, list[str]] = {}
    for word in words:
        if not word:
            return ""
        rests.setdefault(word[0], []).append(word[1:])
    branches = [re.escape(first) + any_of(rest) for first, rest in sorted(rests.items())]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE | re.MULTILINE)
