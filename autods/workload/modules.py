"""`python -m package.module`: which file that is, found without running any of the user's code."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ..errors import InputError

_PREFIX = "module:"


def module_named(workload: Path) -> str | None:
    """'package.module' of 'module:package.module'; None: it is written otherwise."""
    said = str(workload)
    return said.removeprefix(_PREFIX) if said.startswith(_PREFIX) else None


def module_file(name: str, folder: Path) -> tuple[Path, Path]:
    """The file that `python -m name` runs when it is started in `folder`, and the folder that its top package is in.

    Raises InputError when there is none; no parent package is imported to find it.
    """
    if not all(word.isidentifier() for word in name.split(".")):
        mend = "write it as package.module, or drop -m for the path of a script"
        raise InputError("is no module's name", where=f"-m {name}", mend=mend)
    places, spec = _top(name.partition(".")[0], folder), None
    for end in range(1, name.count(".") + 2):
        part = ".".join(name.split(".")[:end])
        spec = importlib.machinery.PathFinder.find_spec(part, places) if places else None
        if spec is None:
            _refuse(name, part, folder)
        places = list(spec.submodule_search_locations or ())
    if places:  # a package: its __main__
        spec = importlib.machinery.PathFinder.find_spec(f"{name}.__main__", places)
        if spec is None:
            mend = f"give a module of it, such as -m {name}.train"
            raise InputError("is a package without a __main__.py", where=f"-m {name}", mend=mend)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise InputError("is no Python source", where=f"-m {name}", mend="give a module that is a .py file")
    file = Path(spec.origin).absolute()
    return file, file.parents[name.count(".") + bool(places)]


def _top(package: str, folder: Path) -> Sequence[str]:
    """Where the top package is looked for: as Python does with -m, in the working directory first. One that is only
    known to a hook of the import system, as in an editable install, is where that says."""
    paths = [str(folder), *(one for one in sys.path if one)]
    if importlib.machinery.PathFinder.find_spec(package, paths) is not None:
        return paths
    spec = importlib.util.find_spec(package)
    return [str(Path(one).parent) for one in (spec.submodule_search_locations or ())] if spec else []


def _refuse(name: str, part: str, folder: Path) -> NoReturn:
    where = f"-m {name}"
    if Path(folder, name).is_file():
        raise InputError("is a file, and -m takes a module's name", where=where, mend=f"drop -m: {name}")
    raise InputError(
        f"there is no module {part} in {folder}, PYTHONPATH or what is installed",
        where=where,
        mend="start it from the folder that holds the package, as python -m wants it, or set PYTHONPATH",
    )
