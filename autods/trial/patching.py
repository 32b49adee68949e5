"""Replace functions of other people's libraries. Each patch is declared once, with its upstream symbol and its reason.

A module declares its patches at import and installs them when it needs them. A symbol that a release has moved or
removed raises `SymbolMissing`, which names the library, its version and the symbol. `tests/unit/test_patches.py` checks
every declared patch against the installed versions.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from ..errors import EnvironmentBroken

_DISTRIBUTIONS = {"pynvml": "nvidia-ml-py", "cpuinfo": "py-cpuinfo"}  # where the import has another name
_ABSENT = object()
_declared: dict[str, Patch] = {}


class SymbolMissing(EnvironmentBroken):
    """The installed release of a library lacks a symbol that autods replaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """A symbol of another library that autods replaces.

    `symbol` is its dotted name from the library's top module, such as "torch.nn.Module._apply"; `why` is one clause
    for the reader of an error. An `optional` symbol exists in some supported releases only: installing its patch does
    nothing where it is absent. A patch that `adds` its symbol needs the owner alone.
    """

    symbol: str
    why: str
    optional: bool = False
    adds: bool = False

    @property
    def library(self) -> str:
        """The library's top module."""
        return self.symbol.partition(".")[0]

    @property
    def name(self) -> str:
        """The attribute that is replaced."""
        return self.symbol.rpartition(".")[2]

    def original(self) -> Any:
        """The symbol's current value, or None if it may be absent and is. Raises SymbolMissing."""
        owner = self._owner()
        try:
            value = getattr(owner, self.name)
        except AttributeError:  # such as a descriptor that answers for instances only
            value = inspect.getattr_static(owner, self.name, _ABSENT)
        if value is not _ABSENT:
            return value
        if self.optional or self.adds or self.name in getattr(owner, "__annotations__", {}):
            return None
        raise SymbolMissing(self._complaint())

    def install(self, replacement: Any, *, owner: Any = None, everywhere: bool = False) -> Any:
        """Replace the symbol for the rest of this process and return its former value. Raises SymbolMissing.

        With `owner`, an instance of the class in `symbol`, only this instance is changed. With `everywhere`, modules
        that have imported the symbol under its own name get the replacement as well.
        """
        former = self.original()
        if former is None and self.optional:
            return None
        if owner is not None:
            former = getattr(owner, self.name)
        setattr(owner if owner is not None else self._owner(), self.name, replacement)
        if everywhere:
            for module in list(sys.modules.values()):
                if module is not None and getattr(module, "__dict__", {}).get(self.name) is former:
                    setattr(module, self.name, replacement)
        return former

    def wrap(self, wrapper: Callable[..., Any], *context: Any, everywhere: bool = False) -> None:
        """Let the function run as `wrapper(*context, original, *args, **kwargs)` for the rest of this process.

        The wrapper takes its own arguments by position only: the function may have keywords of the same names. Raises
        SymbolMissing; an optional symbol that is absent is left alone.
        """
        original = self.original()
        if original is None:
            return

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return wrapper(*context, original, *args, **kwargs)

        self.install(call, everywhere=everywhere)

    @contextlib.contextmanager
    def installed(self, replacement: Any) -> Iterator[Any]:
        """Replace the symbol until the block ends; yields its former value. Raises SymbolMissing."""
        former = self.original()
        if former is None and self.optional:
            yield None
            return
        owner = self._owner()
        stored = vars(owner).get(self.name, _ABSENT)  # absent: inherited from a base class
        setattr(owner, self.name, replacement)
        try:
            yield former
        finally:
            if stored is _ABSENT:
                delattr(owner, self.name)
            else:
                setattr(owner, self.name, stored)

    def problem(self) -> str | None:
        """A sentence if the installed library lacks the symbol; None if all is well or the library is not installed."""
        if importlib.util.find_spec(self.library) is None:
            return None
        try:
            self.original()
        except SymbolMissing as missing:
            return str(missing)
        return None

    def _owner(self) -> Any:
        """The module or class that holds the symbol, or None if an optional one's holder is absent."""
        try:
            return pkgutil.resolve_name(self.symbol.rpartition(".")[0])
        except (ImportError, AttributeError):
            if self.optional:
                return None
            raise SymbolMissing(self._complaint()) from None

    def _complaint(self) -> str:
        distribution = _DISTRIBUTIONS.get(self.library, self.library)
        try:
            version = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            version = "(unknown version)"
        return (
            f"{distribution} {version} has no {self.symbol}, which autods replaces: {self.why}\n"
            "  install the versions of constraints.txt, and report this version of the library to autods"
        )


def declare(symbol: str, why: str, *, optional: bool = False, adds: bool = False) -> Patch:
    """Declare a patch, at the import of the module that installs it."""
    patch = Patch(symbol=symbol, why=why, optional=optional, adds=adds)
    _declared[symbol] = patch
    return patch


def declare_all(owner: str, names: Iterable[str], why: str, *, optional: bool = False) -> dict[str, Patch]:
    """Declare patches of several attributes of one module or class for one reason, by attribute."""
    return {name: declare(f"{owner}.{name}", why, optional=optional) for name in names}


def declared() -> tuple[Patch, ...]:
    """All patches of the modules that are imported so far."""
    return tuple(_declared.values())
