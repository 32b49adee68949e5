"""The corpus of failures: what each run left behind, and the verdict that is right.

A group is a folder with a `cases.toml`, one table per case. A case's log is `<name>.log` beside it or, where a run left
several files, the folder `<name>/`. A line's end is kept as it was written: progress bars end in a bare \\r.

`split.toml` lists the cases that are held out, and the groups that were written unseen. Rules are written and tuned on
the other ones, `dev`.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from autods.types import Action, Tier

CORPUS = Path(__file__).parent
SPLIT = CORPUS / "split.toml"

KINDS = (
    "out_of_memory",
    "memory_pressure",
    "config",
    "toolchain",
    "communication",
    "secondary",
    "user_code",
    "infrastructure",
    "none",
    "unknown",
)
MEMORY = KINDS[:2]
REQUIRED = {"kind": str, "action": str, "source": str}
OPTIONAL = {"tier": str, "rank": int, "exit_code": int}


class CorpusError(ValueError):
    """The corpus contradicts itself; the message names the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The right verdict on `files`: file name → text, one entry for a single log."""

    name: str
    group: str
    files: Mapping[str, str]
    exit_code: int | None
    kind: str
    tier: str | None
    action: str
    rank: int | None
    source: str


def load(folder: Path = CORPUS) -> tuple[Case, ...]:
    """All cases of all groups (`*/cases.toml`) below `folder`, in the order in which they are written."""
    groups = sorted(path.parent for path in folder.glob("*/cases.toml"))
    if not groups:
        raise CorpusError(f"{folder}: no */cases.toml")
    return tuple(case for group in groups for case in load_group(group))


def split(cases: Iterable[Case]) -> dict[str, list[Case]]:
    """The cases by part: `dev`, `holdout` and each unseen group. A case that `split.toml` does not list is in `dev`."""
    manifest = tomllib.loads(SPLIT.read_text(encoding="utf-8"))
    listed = set(manifest["holdout"])
    parts: dict[str, list[Case]] = {"dev": [], "holdout": []} | {group: [] for group in manifest["unseen"]}
    for case in cases:
        part = "holdout" if f"{case.group}/{case.name}" in listed else "dev"
        parts[case.group if case.group in manifest["unseen"] else part].append(case)
    return parts


def checksum(cases: Iterable[Case]) -> str:
    """SHA-256 of the cases' names, logs and labels, in an order of its own."""
    labels = ("group", "name", "files", "exit_code", "kind", "tier", "action", "rank")
    rows = sorted(json.dumps({label: getattr(case, label) for label in labels}, sort_keys=True) for case in cases)
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def load_group(group: Path) -> list[Case]:
    listing = group / "cases.toml"
    try:
        tables = tomllib.loads(listing.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CorpusError(f"{listing}: {error}") from None
    logs = {path.name.removesuffix(".log") for path in group.iterdir() if path.suffix == ".log" or is_run(path)}
    if without_case := sorted(logs - tables.keys()):
        raise CorpusError(f"{listing}: no case for the log {', '.join(without_case)}")
    return [case_of(listing, name, table) for name, table in tables.items()]


def is_run(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(("_", "."))


def case_of(listing: Path, name: str, table: Any) -> Case:
    where = f"{listing}: [{name}]"
    check(where, table)
    return Case(
        name=name,
        group=listing.parent.name,
        files=files_of(where, listing.parent, name),
        exit_code=table.get("exit_code"),
        kind=table["kind"],
        tier=table.get("tier"),
        action=table["action"],
        rank=table.get("rank"),
        source=table["source"],
    )


def check(where: str, table: Any) -> None:
    if not isinstance(table, dict):
        raise CorpusError(f"{where} is not a table")
    if missing := REQUIRED.keys() - table.keys():
        raise CorpusError(f"{where} lacks {', '.join(sorted(missing))}")
    types = REQUIRED | OPTIONAL
    for key, value in table.items():
        if key not in types:
            raise CorpusError(f"{where} has {key}, which means nothing here")
        if type(value) is not types[key]:
            raise CorpusError(f"{where} {key} = {value!r} is not of type {types[key].__name__}")
    for key, known in (("kind", KINDS), ("tier", get_args(Tier)), ("action", get_args(Action))):
        if key in table and table[key] not in known:
            raise CorpusError(f"{where} {key} = {table[key]!r} is none of {', '.join(known)}")
    if (table["kind"] in MEMORY) != ("tier" in table):
        raise CorpusError(f"{where} a tier belongs to out_of_memory and memory_pressure, and to nothing else")


def files_of(where: str, group: Path, name: str) -> dict[str, str]:
    log, run = group / f"{name}.log", group / name
    if log.exists() and run.exists():
        raise CorpusError(f"{where} has both {log.name} and {run.name}/")
    if log.exists():
        return {log.name: text_of(log)}
    files = {path.relative_to(run).as_posix(): text_of(path) for path in sorted(run.rglob("*")) if path.is_file()}
    if not files:
        raise CorpusError(f"{where} has neither {log.name} nor files in {run.name}/")
    return files


def text_of(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        return file.read()
