"""Where in the user's own files something happens."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...workload.protocol import WorkloadError

_PATHS = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_OURS = str(Path(__file__).parents[2])


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file, and what stands there."""

    file: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def caller() -> Place | None:
    """The innermost line of the user's that this call comes from."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_users(file):
            return Place(file, frame.f_lineno, linecache.getline(file, frame.f_lineno).strip())
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def refusal(what: str, *, hint: str, at: Place | None = None) -> WorkloadError:
    """What is wrong with the script, at that line; without one, at the line that this call comes from."""
    place = at or caller()
    return WorkloadError(what, where=None if place is None else str(place), hint=hint)


def everywhere(real: Any, name: str, ours: Any) -> None:
    """Put ours in its place wherever a module has it under its name already."""
    for module in list(sys.modules.values()):
        if module is not None and getattr(module, "__dict__", {}).get(name) is real:
            setattr(module, name, ours)


def of_traceback(error: BaseException) -> Place | None:
    """The innermost line of the user's in its traceback."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    if not frames:
        return None
    return Place(frames[-1].filename, frames[-1].lineno or 0, (frames[-1].line or "").strip())


def installed_in(searched: Iterable[str]) -> tuple[str, ...]:
    """Of the folders that Python searches for modules, those that packages are installed in, with a separator each:
    with `pip install --user` or --target these are others than the interpreter's own."""
    others = {one for one in searched if one and next(Path(one).glob("*.dist-info"), None) is not None}
    return tuple(os.path.join(one, "") for one in sorted(_PATHS | others))


_INSTALLED = installed_in(sys.path)


def _is_users(file: str) -> bool:
    return not file.startswith((*_INSTALLED, _OURS, "<"))
