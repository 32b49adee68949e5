"""What launchers and loggers put before a line: rank, host, process, time, level, location."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

Level = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Prefix:
    """stream: lines with the same one were written by the same process, as far as can be told."""

    stream: str = ""
    rank: int | None = None
    level: Level | None = None
    time: str = ""


_LEVELS: dict[str, Level] = {
    "d": "debug", "debug": "debug", "trace": "debug", "i": "info", "info": "info", "notice": "info",
    "w": "warning", "warn": "warning", "warning": "warning",
    "e": "error", "error": "error", "err": "error", "c": "error", "critical": "error", "f": "error", "fatal": "error",
    "severe": "error", "exception": "error",
}  # fmt: skip
_LEVEL = r"(?P<level>DEBUG|TRACE|INFO|NOTICE|WARN(?:ING)?|ERR(?:OR)?|CRITICAL|FATAL|SEVERE)"

# Each is tried at the line's start, again and again, until none matches: prefixes come in any order.
_PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        # torch.distributed's exception hook, torchrun --tee, Lightning, Megatron.
        r"\[(?:rank|default|trainer|worker|Rank|RANK)[ :=]?\s?(?P<rank>\d+)\]:? ?",
        r"\[?(?:rank|RANK|Rank)[ :=]{0,2}(?P<rank>\d+)\]? ?(?:[:|]|- ) ?",
        r"\[\d+,\s?(?P<rank>\d+)\]<std(?:err|out)>: ?",  # mpirun --tag-output
        r"\[(?P<rank>\d{1,4})\]:? (?=\S|  )",
        r" ?(?P<rank>\d{1,4}): (?!\d)",  # srun --label
        # A Ray worker, a pod, a container, a host (pdsh).
        r"\[(?P<stream>[a-z]+\d+\|(?P<rank>\d+))\]: ?",  # torchx: [trainer0|3]:
        r"(?P<stream>\(\w[\w.:-]* pid=\d+(?:, ip=[\w.:-]+)?\))(?: \[repeated[^\]]*\])? ?",
        r"(?P<stream>\[pod/[^\]\s]+\]) ?",
        r"(?P<stream>[a-z][\w.-]*[-_]\d+)\s+\| ",
        r"(?P<stream>(?:[a-z][\w-]*\d(?:\.[a-z\d.-]+)?|(?:\d{1,3}\.){3}\d{1,3})): (?!\d+: )",
        # Times, in every dress.
        r"\[?(?P<time>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?)(?:Z|[+-]\d\d:?\d\d)?\]?:? ?(?:[-|] )?",
        r"\[?(?P<time>\d\d/\d\d/(?:\d{4}|\d\d) \d\d:\d\d:\d\d(?:[.,]\d+)?)\]?(?: [AP]M)?:? ?(?:[-|] )?",
        r"(?P<time>(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +\d+ \d\d:\d\d:\d\d) ",
        r"\[?(?P<time>\d\d:\d\d:\d\d(?:[.,]\d+)?)\]?:? (?:[-|] )?",
        # glog and torch's C++ logger: E0505 12:00:00.123456 140 file.cc:12]
        r"\[?(?:(?P<rank>\d+)\]:\[)?(?P<level>[DIWEF])\d{3,4} (?P<time>[\d:.]+) +\d* ?[\w./-]+:\d+\] ?",
        r"\[(?P<level>[DIWEF]) [\w./-]+:\d+\] ?",
        r"(?:\[[A-Z][A-Za-z]{1,9}\] ?)?\[(?P<level>[DIWEF])\] ",  # TensorRT
        r"\[?(?P<time>\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d)\]? ?",
        # Levels and places.
        r"(?P<level>[DIWEF]) \w+/[\w./-]+:\d+\] ",  # tensorflow
        r"\[" + _LEVEL + r"\|[^\]]*\] ?(?:[\w.]+:\d+ >> )?",  # transformers
        r"\[" + _LEVEL + r"\s*\](?: ?[:|-] )? ?",
        _LEVEL + r"(?::[\w.]+)?:(?: |(?=\w))",
        _LEVEL + r"\s+(?:\| |- )?",
        r"\[[\w./-]+\.py:\d+(?::[\w<>.-]*)*\] ?",
        r"[\w.<>]+:[\w<>.]+:\d+ - ",
        r"[\w./-]+\.(?:py|cc|cpp|cu|h):\d+\]?:? (?:[-|] )?",
        r"- (?=\S)",
        r"\| (?=\S)",
    )
)
_MOST = 7


def split_prefix(text: str) -> tuple[Prefix, str]:
    """The prefix and the rest of a line; the rest keeps its indentation."""
    prefix, rest = Prefix(), text
    if text.startswith("   "):  # a frame of a traceback, code, a continuation
        return prefix, rest
    for _ in range(_MOST):
        found = next((match for pattern in _PREFIXES if (match := pattern.match(rest))), None)
        if found is None or not found[0]:
            break
        prefix = _with(prefix, found.groupdict())
        rest = rest[found.end() :]
    return prefix, rest


def joined(outer: Prefix, inner: Prefix) -> Prefix:
    """What a line's own prefix says, and then what its record says."""
    return Prefix(
        stream=f"{outer.stream} {inner.stream}".strip() if inner.stream else outer.stream,
        rank=inner.rank if inner.rank is not None else outer.rank,
        level=inner.level or outer.level,
        time=outer.time or inner.time,
    )


def level_of(word: str) -> Level | None:
    """'error' for "CRITICAL"; None for a word that is no level."""
    return _LEVELS.get(word.lower())


def _with(prefix: Prefix, said: dict[str, str | None]) -> Prefix:
    if (rank := said.get("rank")) is not None:
        prefix = replace(prefix, rank=int(rank), stream=f"{prefix.stream} rank {rank}")
    if (stream := said.get("stream")) is not None:
        prefix = replace(prefix, stream=f"{prefix.stream} {stream}")
    if (level := said.get("level")) is not None and prefix.level is None:
        prefix = replace(prefix, level=_LEVELS[level.lower()])
    if (time := said.get("time")) is not None and not prefix.time:
        prefix = replace(prefix, time=time.replace(",", ".").replace("T", " "))
    return prefix
