"""Lines of the user's files: on the current stack, and in a traceback."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_LIBRARY_FOLDERS = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
AUTODS = str(Path(__file__).parents[1])


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file, with its source text."""

    file: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def library_folders(search_path: Iterable[str]) -> tuple[str, ...]:
    """The folders of the search path that hold installed packages, each with a separator at its end.

    `pip install --user` and `--target` install into other folders than the interpreter's own.
    """
    others = {folder for folder in search_path if folder and next(Path(folder).glob("*.dist-info"), None) is not None}
    return tuple(os.path.join(folder, "") for folder in sorted(_LIBRARY_FOLDERS | others))


_NOT_THE_USERS = (*library_folders(sys.path), AUTODS, "<")


def is_users(file: str) -> bool:
    """Whether a file of a frame is neither a library's nor autods' own."""
    return not file.startswith(_NOT_THE_USERS)


def find_caller(frame: FrameType | None = None) -> Place | None:
    """The innermost line of the user's files on the current stack, or on that of `frame`; None if there is none."""
    return _first_of_user(traceback.walk_stack(frame or sys._getframe(1)))


def find_raiser(error: BaseException) -> Place | None:
    """The innermost line of the user's files in the traceback, or None."""
    return _first_of_user(reversed(list(traceback.walk_tb(error.__traceback__))))


def _first_of_user(frames: Iterable[tuple[FrameType, int]]) -> Place | None:
    for frame, line in frames:
        file = frame.f_code.co_filename
        if is_users(file):
            return Place(file, line, linecache.getline(file, line).strip())
    return None
