"""Files of a user's that have the name of a module that autods needs, and are imported in its place.

Only the standard library is imported here: this has to work where little else can be imported.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

_MOST = 300  # characters of an exception's text
_HINT = "install it again; where memory is limited, raise `ulimit -v`"


def describe_failed_import(error: BaseException) -> str:
    """Two lines about an exception that ended the imports of what autods needs."""
    if (hidden := describe_hidden_module(error)) is not None:
        return hidden
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    text = " ".join(str(error).split())[:_MOST]
    return f"{place}what autods needs cannot be imported: {type(error).__name__}: {text}\n  {_HINT}"


def describe_hidden_module(error: BaseException) -> str | None:
    """Two lines, where the exception arose because a file outside the installation has the name of a module."""
    for file in _list_files(error):
        name, folder = (file.parent.name, file.parents[1]) if file.stem == "__init__" else (file.stem, file.parent)
        others = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != os.path.realpath(folder)]
        is_installed = os.path.realpath(folder) in map(os.path.realpath, sysconfig.get_paths().values())
        if len(others) < len(sys.path) and not is_installed and PathFinder.find_spec(name, others) is not None:
            hint = "rename it, or leave its folder out of PYTHONPATH"
            return f"{file}: it hides the module {name}, which autods needs\n  {hint}"
    return None


def _list_files(error: BaseException | None) -> Iterator[Path]:
    """The files that may have caused the exception: of the module that lacks something, then of the frames."""
    while error is not None:
        module = getattr(error, "obj", None)  # of an AttributeError
        if isinstance(error, ImportError):
            module = sys.modules.get((error.name or "").partition(".")[0])
        if isinstance(module, ModuleType) and module.__file__:
            yield Path(module.__file__)
        yield from (Path(frame.filename) for frame in reversed(traceback.extract_tb(error.__traceback__)))
        error = error.__cause__ or error.__context__
