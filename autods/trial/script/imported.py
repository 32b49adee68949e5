"""What is done to a module as soon as a script imports it, so that nobody pays for one that it does not need."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Act = Callable[[ModuleType], None]


def when_imported(name: str, act: Act) -> None:
    """Once, right after the module has run; at once where it is there already. name: of a top-level module."""
    if (module := sys.modules.get(name)) is not None:
        act(module)
    else:
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, act: Act) -> None:
        self._name, self._act = name, act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The usual one, whose loader tells."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._act)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, real: importlib.abc.Loader, act: Act) -> None:
        self._real, self._act = real, act

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As the real one."""
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As the real one; then it is told."""
        self._real.exec_module(module)
        self._act(module)
