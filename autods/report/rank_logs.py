"""The logs of the ranks while a trial runs, for those who ask to see them."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..files import is_library_file
from ..plain_text import drop_terminal_codes
from ..system import stacks
from ..system.processes import find_log_parts
from ..types import Trial

_MOST_BYTES = 2**20  # of a log at a time; what is longer follows the next time
_MOST_LETTERS = 2000  # of a line
_WARNING = re.compile(r"(/.+\.py):\d+: \w*Warning: ")
_LINE_END = re.compile(rb"[\r\n]+")  # a progress bar ends its lines with \r


def is_library_warning(line: str) -> bool:
    """Whether a line is a warning of a library, as ranks print it (`rank.worker.show_library_warnings_once`)."""
    place = _WARNING.match(line)
    return place is not None and is_library_file(place[1])


class LogTail:
    """A log that grows, and how far its lines were read.

    Stacks that a silent rank wrote because the monitor asked for them are left out: an evaluation of minutes is asked
    again and again, and nothing is wrong with it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._in_stack = False

    def read(self, *, ended: bool = False) -> list[str]:
        """The lines since the last call; with `ended`, the last one too if it has no end."""
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._offset and (parts := find_log_parts(self.path)):  # its beginning is there now
                    self._offset = max(0, self._offset - parts[-1].stat().st_size)
                begin = min(self._offset, size)
                file.seek(begin)
                new = file.read(_MOST_BYTES)
        except OSError:
            return []  # it is gone, or not readable: progress is no reason to end a fit
        end = max(new.rfind(b"\n"), new.rfind(b"\r")) + 1
        if ended or (not end and len(new) == _MOST_BYTES):
            end = len(new)
        self._offset = begin + end
        lines = (drop_terminal_codes(line.decode(errors="replace")).rstrip() for line in _LINE_END.split(new[:end]))
        return [line[:_MOST_LETTERS] for line in self._drop_stacks(lines) if line]

    def _drop_stacks(self, lines: Iterable[str]) -> Iterator[str]:
        for line in filter(None, lines):
            if line.endswith(stacks.ANSWER):  # what was printed before it may have no line end
                self._in_stack = True
                yield line.removesuffix(stacks.ANSWER).rstrip()
            elif not (self._in_stack and stacks.is_frame(line)):
                self._in_stack = False
                yield line


class RankLogs:
    """Reads what ranks print, trial by trial. `folder` is the one of all logs. Thread-safe.

    Logs of ranks on other nodes are there only where the nodes share the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tails: dict[Path, LogTail] = {}
        self._lock = threading.Lock()

    def read_new_lines(self, id: int, trial: Trial, *, ended: bool = False) -> list[str]:
        """'rank 0: …' for each line since the last call; with `ended`, the last line too if it has no end."""
        with self._lock:
            logs = self._folder.glob(f"{id:03d}-{trial.rung}*/rank*.log")
            return [
                f"rank {path.stem.removeprefix('rank')}: {line}"
                for path in sorted(logs, key=lambda path: (len(path.name), path))
                for line in self._tails.setdefault(path, LogTail(path)).read(ended=ended)
            ]
