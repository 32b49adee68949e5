"""Log records that are data: a line of JSON or of logfmt, taken apart into prefix and text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from .prefix import Prefix, level_of, split_prefix

_TEXT = ("message", "msg", "log", "event", "MESSAGE", "textPayload", "body", "text")
_RANK = ("rank", "global_rank", "world_rank", "process_rank", "RANK", "worker_rank", "rank_id")
_LEVEL = ("level", "levelname", "severity", "lvl", "log_level", "levelName")
_TIME = ("time", "ts", "timestamp", "@timestamp", "asctime", "datetime", "created")
_STREAM = ("pod", "pod_name", "container", "hostname", "host", "node", "worker", "process", "pid", "stream")
_LONGEST = 1 << 16
_DEEPEST = 4
_FAILED = re.compile(r"Traceback \(most recent call last\)|^\s*(?:[\w.]+(?:Error|Exception)): ", re.MULTILINE)

_LOGFMT = re.compile(r'(?:[\w.@-]+=(?:"(?:[^"\\]|\\.)*"|\S*) *){2,}$')
_PAIR = re.compile(r'([\w.@-]+)=("(?:[^"\\]|\\.)*"|\S*)')


def record_of(text: str) -> tuple[Prefix, list[str]] | None:
    """The prefix and the lines of a structured record; None for plain text, and for data without a message."""
    fields = _fields(text)
    if fields is None:
        return None
    said = _first(fields, _TEXT)
    if fields.get("OOMKilled") is True:  # docker's state of a container
        said = f"OOMKilled, exit code: {fields.get('ExitCode', 137)}"
        return Prefix(), [said]
    if isinstance(ended := fields.get("reason"), str) and "exitCode" in fields:  # a container's last state
        said = f"reason: {ended}, exit code: {fields['exitCode']}"
    trace = [value for value in fields.values() if isinstance(value, str) and value != said and _FAILED.search(value)]
    dressed = any(name in fields for name in (*_LEVEL, *_TIME, *_RANK, *_STREAM, "exitCode"))
    if not dressed or (not isinstance(said, str) and not trace):
        return None
    lines = [line for part in (said, *trace) if isinstance(part, str) for line in part.splitlines()]
    prefix, first = split_prefix(lines[0]) if lines else (Prefix(), "")
    return _merged(prefix, fields), [first, *lines[1:]]


def _fields(text: str) -> Mapping[str, Any] | None:
    text = text.strip()
    if len(text) > _LONGEST:
        return None
    if text.startswith('{"') and text.endswith("}"):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return _flat(found) if isinstance(found, dict) else None
    if "msg=" in text and _LOGFMT.match(text):
        return {name: value.strip('"').replace('\\"', '"').replace("\\n", "\n") for name, value in _PAIR.findall(text)}
    return None


def _flat(found: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """What is nested (`record`, `extra`, torchrun's `message`) is read as if it stood outside; the outer names win."""
    flat = {name: value for name, value in found.items() if not isinstance(value, dict)}
    for value in found.values():
        if isinstance(value, dict) and depth < _DEEPEST:
            flat = {**_flat(value, depth + 1), **flat}
    return flat


def _merged(prefix: Prefix, fields: Mapping[str, Any]) -> Prefix:
    rank = _first(fields, _RANK)
    number = int(rank) if isinstance(rank, int) or (isinstance(rank, str) and rank.isdigit()) else None
    named = "/".join(str(fields[name]) for name in _STREAM if isinstance(fields.get(name), str | int))
    level = level_of(str(_first(fields, _LEVEL) or ""))
    time = _first(fields, _TIME)
    return replace(
        prefix,
        rank=prefix.rank if prefix.rank is not None else number,
        stream=f"{prefix.stream} {named} {'' if number is None else f'rank {number}'}".strip(),
        level=prefix.level or level,
        time=prefix.time or (str(time) if time is not None else ""),
    )


def _first(fields: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((fields[name] for name in names if name in fields and fields[name] not in (None, "")), None)
