"""The logs of the ranks while a trial runs, for those who ask to see them."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..types import Trial

_MOST_BYTES = 2**20  # of a log at a time; what is longer follows the next time
_MOST_LETTERS = 2000  # of a line
_LINE_END = re.compile(rb"[\r\n]+")  # a progress bar ends its lines with \r
_RANK = re.compile(r"rank(\d+)\.log")


@dataclass(slots=True)
class _Log:
    """How far a log was read, and the begin of a line that has no end yet."""

    path: Path
    rank: int
    offset: int = 0
    rest: bytes = b""


class RankLogs:
    """Reads what ranks print, trial by trial. `folder` is the one of all logs. Thread-safe.

    Logs of ranks on other nodes are there only where the nodes share the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._logs: dict[Path, _Log] = {}
        self._lock = threading.Lock()

    def read_new_lines(self, id: int, trial: Trial, *, ended: bool = False) -> list[str]:
        """'rank 0: …' for each line since the last call; with `ended`, the last line too if it has no end."""
        with self._lock:
            return [line for log in self._find_logs(id, trial) for line in _read_lines(log, ended=ended)]

    def _find_logs(self, id: int, trial: Trial) -> list[_Log]:
        """The logs of a trial, by rank."""
        for path in self._folder.glob(f"{id:03d}-{trial.rung}*/rank*.log"):
            if (match := _RANK.fullmatch(path.name)) is not None and path not in self._logs:
                self._logs[path] = _Log(path, int(match[1]))
        wanted = (log for log in self._logs.values() if log.path.parent.name.startswith(f"{id:03d}-"))
        return sorted(wanted, key=lambda log: (log.rank, log.path))


def _read_lines(log: _Log, *, ended: bool) -> Iterator[str]:
    try:
        with log.path.open("rb") as file:
            file.seek(log.offset)
            new = file.read(_MOST_BYTES)
    except OSError:
        return  # it is gone, or not readable: progress is no reason to end a fit
    log.offset += len(new)
    *lines, log.rest = _LINE_END.split(log.rest + new)
    if ended or len(log.rest) > _MOST_BYTES:
        lines.append(log.rest)
        log.rest = b""
    for line in lines:
        if text := line.decode(errors="replace").rstrip():
            yield f"rank {log.rank}: {text[:_MOST_LETTERS]}"
