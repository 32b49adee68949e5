"""Remember which module of transformers defines which model.

transformers reads the source of all its models for that at each import, which takes half a second of the import's one
and a half. The answer is kept in our cache for as long as none of these files changes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..system import private
from ..system.host import cache_folder
from .patching import declare

_READ = declare(
    "transformers.utils.import_utils.create_import_structure_from_path",
    "it reads the source of every model at each import",
    optional=True,
)


def remember_models() -> None:
    """Let `transformers`, whose `import_utils` has just been imported, find its models in our cache."""
    read = _READ.original()
    if read is not None:
        _READ.install(functools.cache(functools.partial(read_models, read)))


def read_models(read: Callable[[Any], Any], path: str | Path) -> Any:
    """Return what `read(path)` does, from the cache if `path` is the folder of all models, or a file in it."""
    folder = Path(path)
    folder = folder.parent if folder.is_file() else folder
    if folder.name != "models":
        return read(path)
    name = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    file, state = cache_folder() / "transformers" / f"{name}.pickle", _digest_sources(folder)
    with contextlib.suppress(Exception):  # it is not there, is damaged, or another user may have written it
        state_before, models = pickle.loads(private.read(file))
        if state_before == state:
            return models
    models = read(path)
    with contextlib.suppress(Exception):  # a cache that cannot be written
        private.write(file, pickle.dumps((state, models)))
    return models


def _digest_sources(folder: Path) -> str:
    """A digest of the paths, sizes and times of all sources below the folder."""
    sources = []
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".py"):
                path = os.path.join(parent, name)
                state = os.stat(path)
                sources.append((path, state.st_size, state.st_mtime_ns))
    return hashlib.sha256(repr(sorted(sources)).encode()).hexdigest()
