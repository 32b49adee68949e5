"""The files that a prepared process and its forks have read, as they were then: answers hold while these stay the same.

A module counts by its source or library, a file that is mapped, such as a dataset of Arrow, by its map, and others
where Python opens them. A file that a library in C reads without a map is not seen. An audit hook would hear of each
`open`, too, and of each `id()` besides: simulations would take a third longer.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...rank.patching import declare

Stamp = tuple[int, int]  # of a file: its bytes, and when it was last changed, in ns
_WHY = "what a simulation has read decides how long it holds"
_OPENS = declare("builtins.open", _WHY), declare("io.open", _WHY)
_OS_OPEN = declare("os.open", _WHY)
_NO_FILES = ("/proc/", "/sys/", "/dev/")
_MAPS = Path("/proc/self/maps")


def read_stamp(path: str) -> Stamp | None:
    """Return the stamp of a regular file; None for anything else."""
    with contextlib.suppress(OSError, ValueError):
        state = os.stat(path)
        return (state.st_size, state.st_mtime_ns) if stat.S_ISREG(state.st_mode) else None
    return None


class FilesRead:
    """Collects what this process has read, without the simulator's own files in `scratch`. A fork goes on with it."""

    def __init__(self, scratch: str) -> None:
        self._ignored = (*_NO_FILES, scratch.rstrip("/") + "/")
        self._opened: set[str] = set()
        self._collected: set[str] = set()

    def listen(self) -> None:
        """Note what Python opens, for the rest of this process."""
        for patch in _OPENS:
            patch.wrap(self._open)
        _OS_OPEN.wrap(self._os_open)

    def _open(self, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        file = args[0] if args else kwargs.get("file")
        mode = args[1] if len(args) > 1 else kwargs.get("mode", "r")
        if not set(mode) & set("wax"):
            self._note(file)
        return original(*args, **kwargs)

    def _os_open(self, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        flags = args[1] if len(args) > 1 else kwargs.get("flags", 0)
        if flags & os.O_ACCMODE == os.O_RDONLY:
            self._note(args[0] if args else kwargs.get("path"))
        return original(*args, **kwargs)

    def _note(self, file: object) -> None:
        if isinstance(file, (str, bytes, os.PathLike)):
            self._opened.add(os.path.abspath(os.fsdecode(file)))

    def collect(self) -> dict[str, Stamp | None]:
        """Return the stamps of what was read since the last call; None for what was looked for and is missing."""
        new = {path for path in self._list() if path not in self._collected and not path.startswith(self._ignored)}
        self._collected |= new
        return {path: read_stamp(path) for path in sorted(new)}

    def _list(self) -> Iterator[str]:
        yield from tuple(self._opened)
        # A lazy module would be imported by getattr(module, "__file__").
        modules = [getattr(module, "__dict__", {}) for module in tuple(sys.modules.values())]
        yield from (path for module in modules if isinstance(path := module.get("__file__"), str))
        mapped = (line.split(None, 5)[5:] for line in _MAPS.read_text().splitlines())
        yield from (path for parts in mapped for path in parts if path.startswith("/"))  # not [heap]
