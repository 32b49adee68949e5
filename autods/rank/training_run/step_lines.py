"""The lines of a run's steps, which rank 0 writes and the driver reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...errors import NO_ROOM


class StepLines:
    """The file of a run's steps: one line of JSON each, appended. It stays open until the rank ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._unwritten = b""

    def write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append lines; those for which the disk has no room wait for the next ones."""
        self._unwritten += "".join(json.dumps(line) + "\n" for line in lines).encode()
        try:
            if self._file is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._file = os.open(self._path, flags, 0o644)
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
