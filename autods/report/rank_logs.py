"""The logs of the ranks while a trial runs, for those who ask to see them."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

from ..types import Trial

_MOST_BYTES = 2**20  # of a log at a time; what is longer follows the next time
_MOST_LETTERS = 2000  # of a line
_LINE_END = re.compile(rb"[\r\n]+")  # a progress bar ends its lines with \r


class RankLogs:
    """Reads what ranks print, trial by trial. `folder` is the one of all logs. Thread-safe.

    Logs of ranks on other nodes are there only where the nodes share the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._lock = threading.Lock()

    def read_new_lines(self, id: int, trial: Trial, *, ended: bool = False) -> list[str]:
        """'rank 0: …' for each line since the last call; with `ended`, the last line too if it has no end."""
        with self._lock:
            logs = sorted(
                self._folder.glob(f"{id:03d}-{trial.rung}*/rank*.log"), key=lambda path: (len(path.name), path)
            )
            return [
                f"rank {path.stem.removeprefix('rank')}: {line}" for path in logs for line in self._read(path, ended)
            ]

    def _read(self, path: Path, ended: bool) -> list[str]:
        begin = self._offsets.get(path, 0)
        try:
            with path.open("rb") as file:
                begin = min(begin, os.fstat(file.fileno()).st_size)  # `processes.shorten_log` may have cut its middle
                file.seek(begin)
                new = file.read(_MOST_BYTES)
        except OSError:
            return []  # it is gone, or not readable: progress is no reason to end a fit
        end = max(new.rfind(b"\n"), new.rfind(b"\r")) + 1
        if ended or (not end and len(new) == _MOST_BYTES):
            end = len(new)
        self._offsets[path] = begin + end
        lines = (line.decode(errors="replace").rstrip() for line in _LINE_END.split(new[:end]))
        return [line[:_MOST_LETTERS] for line in lines if line]
