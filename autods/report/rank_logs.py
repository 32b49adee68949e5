"""The logs of the ranks while a trial runs, for those who ask to see them."""

from __future__ import annotations

import os
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
class LogTail:
    """How far a log was read, and the begin of a line that has no end yet."""

    path: Path
    offset: int = 0
    rest: bytes = b""

    def read(self, *, ended: bool = False) -> Iterator[str]:
        """Yield the lines since the last call; with `ended`, the last one too if it has no end."""
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self.offset:  # `processes.shorten_log` has cut its middle out
                    self.offset, self.rest = size, b""
                file.seek(self.offset)
                new = file.read(_MOST_BYTES)
        except OSError:
            return  # it is gone, or not readable: progress is no reason to end a fit
        self.offset += len(new)
        *lines, self.rest = _LINE_END.split(self.rest + new)
        if ended or len(self.rest) > _MOST_BYTES:
            lines.append(self.rest)
            self.rest = b""
        for line in lines:
            if text := line.decode(errors="replace").rstrip():
                yield text[:_MOST_LETTERS]


class RankLogs:
    """Reads what ranks print, trial by trial. `folder` is the one of all logs. Thread-safe.

    Logs of ranks on other nodes are there only where the nodes share the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._logs: dict[Path, tuple[int, LogTail]] = {}
        self._lock = threading.Lock()

    def read_new_lines(self, id: int, trial: Trial, *, ended: bool = False) -> list[str]:
        """'rank 0: …' for each line since the last call; with `ended`, the last line too if it has no end."""
        with self._lock:
            logs = self._find_logs(id, trial)
            return [f"rank {rank}: {line}" for rank, log in logs for line in log.read(ended=ended)]

    def _find_logs(self, id: int, trial: Trial) -> list[tuple[int, LogTail]]:
        """The logs of a trial, by rank."""
        for path in self._folder.glob(f"{id:03d}-{trial.rung}*/rank*.log"):
            if (match := _RANK.fullmatch(path.name)) is not None and path not in self._logs:
                self._logs[path] = int(match[1]), LogTail(path)
        wanted = (each for each in self._logs.values() if each[1].path.parent.name.startswith(f"{id:03d}-"))
        return sorted(wanted, key=lambda each: (each[0], each[1].path))
