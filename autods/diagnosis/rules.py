"""Signatures of failures: rows of data in the TOML files beside this one, the most specific first."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ..schema import read_as
from ..types import Action, Tier
from .values import Kind

# How much a row says. decisive: somebody outside the process says what ended it. cause: it names the cause. likely: it
# is the cause when nothing else names one. secondary: another process holds the cause. weak: better than an exit code.
# hint: it corroborates. pressure: memory was short, the run went on. benign: it only sounds bad.
# done: the run ended well.
Weight = Literal["decisive", "cause", "likely", "secondary", "weak", "hint", "pressure", "benign", "done"]
ERROR_LINE = "an error line"  # stands for the type where a line that is no exception says that something failed
# The order in which the files are asked: what wears the words of another class comes before that class.
FILES = (
    "benign", "not_memory", "ambiguous", "pinned", "shm", "disk", "device", "host", "pressure", "infrastructure",
    "config",
    "toolchain", "secondary", "communication", "user_code",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One row. It matches a message when every condition that it has holds.

    says: one of these, in lower case, is in the text. types: the exception has one of these names. pattern, also,
    stack, unless: regular expressions on the text, on the line that `pattern` found, on the traceback's frames, and on
    text that must not be there.
    passing: a line that only mentions it counts too. budget: for a process under a memory budget it means that this
    is used up. killed: it says that a process was killed, which an OOM killer did only if the node's memory says so
    (where that is known). example: a message that this row and no earlier one matches.
    """

    name: str
    kind: Kind
    action: Action
    advice: str
    example: str
    source: str
    tier: Tier | None = None
    weight: Weight = "cause"
    says: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    pattern: str = ""
    also: str = ""
    stack: str = ""
    unless: str = ""
    passing: bool = False
    budget: bool = False
    killed: bool = False
    example_stack: str = ""
    file: str = ""

    def matches(self, text: str, type: str, stack: str) -> bool:
        """Whether every condition but `says` holds. Cheapest first."""
        if self.types and type not in self.types and not ("*" in self.types and type not in ("", ERROR_LINE)):
            return False
        if self.pattern and not self._says_in_a_line(text):
            return False
        if self.stack and not _compiled(self.stack).search(stack):
            return False
        return not (self.unless and _compiled(self.unless).search(text))

    def _says_in_a_line(self, text: str) -> bool:
        found = _compiled(self.pattern).search(text)
        if found is None or not self.also:
            return found is not None
        start, end = text.rfind("\n", 0, found.start()) + 1, text.find("\n", found.end())
        return _compiled(self.also).search(text, start, len(text) if end < 0 else end) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A TOML file: what its rows share, and the rows."""

    kind: Kind
    action: Action
    advice: str
    row: tuple[Mapping[str, Any], ...]
    tier: Tier | None = None
    weight: Weight = "cause"
    passing: bool = False


_FOLDER = Path(__file__).with_name("signatures")
_REGEXES = ("pattern", "also", "stack", "unless")
_FRAGMENT = re.compile(r"\{([a-z_]+)\}")


@cache
def _fragments() -> dict[str, str]:
    """Name → regular expression, from `signatures/fragments.toml`."""
    lists = tomllib.loads((_FOLDER / "fragments.toml").read_text(encoding="utf-8"))
    return {name: f"(?:{'|'.join(alternatives)})" for name, alternatives in lists.items()}


def _expand(pattern: str) -> str:
    """Replace each {name} by the fragment of that name. Raises KeyError for a name that does not exist."""
    return _FRAGMENT.sub(lambda match: _fragments()[match[1]], pattern)


@cache
def rows() -> tuple[Signature, ...]:
    """Every row, in the order in which they are asked."""
    return tuple(row for name in FILES for row in _read(name))


def _read(name: str) -> list[Signature]:
    file = read_as(_File, tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8")))
    shared = {
        "kind": file.kind, "action": file.action, "advice": file.advice, "tier": file.tier,
        "weight": file.weight, "passing": file.passing, "file": name,
    }  # fmt: skip
    found = []
    for row in file.row:
        own = {key: _expand(value) if key in _REGEXES else value for key, value in row.items()}
        if own.get("kind", file.kind) != file.kind and "tier" not in own:
            own["tier"] = None
        found.append(read_as(Signature, {**shared, **own}))
    return found


def first_match(text: str, *, type: str = "", stack: str = "", passing: bool = False) -> Signature | None:
    """The first row that matches. passing: the line only mentions it, so only rows that allow that are asked."""
    lowered = text.lower()
    for row in rows():
        if row.says and not any(words in lowered for words in row.says):
            continue
        if (row.passing or not passing) and row.matches(text, type, stack):
            return row
    return None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE | re.MULTILINE)
