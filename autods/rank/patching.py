"""Replace functions of other people's libraries. Each patch is declared once, with its upstream symbol and its reason.

A module declares its patches at import and installs them when it needs them. A symbol that a release has moved or
removed raises `SymbolMissing`, which names the library, its version and the symbol.
`tests/integration/test_patches.py` checks every declared patch against the installed versions.
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
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from ..errors import EnvironmentBroken, find_first_cause

_DISTRIBUTIONS = {"pynvml": "nvidia-ml-py", "cpuinfo": "py-cpuinfo"}  # where the import has another name
_ABSENT = object()
_PACKAGE = __file__.removesuffix("rank/patching.py")  # of autods
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

    def original(self) -> Any:
        """The symbol's current value, or None if it may be absent and is. Raises SymbolMissing."""
        return self._find()[1]

    def install(self, replacement: Any, *, everywhere: bool = False) -> Any:
        """Replace the symbol for the rest of this process and return its former value. Raises SymbolMissing.

        `inspect` shows a function that stands for another one as the other one. With `everywhere`, modules that have
        imported the symbol under its own name get the replacement as well.
        """
        holder, former = self._find()
        if holder is None:
            return None
        name = self.symbol.rpartition(".")[2]
        if inspect.isfunction(former) and inspect.isfunction(replacement) and not hasattr(replacement, "__wrapped__"):
            replacement = functools.update_wrapper(_copy(replacement), former)
        setattr(holder, name, replacement)
        for module in list(sys.modules.values()) if everywhere else ():
            if module is not None and getattr(module, "__dict__", {}).get(name) is former:
                setattr(module, name, replacement)
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
        holder, former = self._find()
        if holder is None:
            yield None
            return
        name = self.symbol.rpartition(".")[2]
        stored = vars(holder).get(name, _ABSENT)  # absent: inherited from a base class
        setattr(holder, name, replacement)
        try:
            yield former
        finally:
            if stored is _ABSENT:
                delattr(holder, name)
            else:
                setattr(holder, name, stored)

    def _find(self) -> tuple[Any, Any]:
        """The module or class that holds the symbol, and its value; None for each that may be absent and is."""
        path, _, name = self.symbol.rpartition(".")
        holder = cause = None
        try:
            holder = pkgutil.resolve_name(path)
        except (ImportError, AttributeError) as error:
            cause = error.__cause__
        if holder is not None:
            value = getattr(holder, name, _ABSENT)
            if value is _ABSENT:  # such as a descriptor that answers for instances only
                value = inspect.getattr_static(holder, name, _ABSENT)
            if value is not _ABSENT:
                return holder, value
            if self.adds or name in getattr(holder, "__annotations__", {}):
                return holder, None
        if self.optional:
            return None, None
        library = path.partition(".")[0]
        distribution = _DISTRIBUTIONS.get(library, library)
        try:
            version = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            version = "(unknown version)"
        if cause is not None:
            cause = find_first_cause(cause)
            raise SymbolMissing(
                f"{distribution} {version} cannot import {path}: {type(cause).__name__}: {cause}\n"
                f"  the packages in {sys.executable} do not fit together: take other versions of them"
            )
        raise SymbolMissing(
            f"{distribution} {version} has no {self.symbol}, which autods replaces: {self.why}\n"
            "  install the versions of constraints.txt, and report this version of the library to autods"
        )


def _copy(function: FunctionType) -> FunctionType:
    """The same function as another object: one may stand for several, with the name and the source of each."""
    code, names = function.__code__, function.__globals__
    copy = FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def find_original(value: Any) -> Any:
    """The function that a function of autods stands for, as its library has it; any other value itself."""
    code = getattr(value, "__code__", None)
    is_ours = code is not None and code.co_filename.startswith(_PACKAGE) and hasattr(value, "__wrapped__")
    return find_original(value.__wrapped__) if is_ours else value


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Call `action` once, right after the module has run; at once if it is imported already."""
    if name in sys.modules:
        action()
        return

    is_looking = False

    def find_spec(fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        nonlocal is_looking
        if fullname != name or is_looking:
            return None
        is_looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            is_looking = False
        if spec is not None and spec.loader is not None:
            run_module = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run_module(module)
                if finder in sys.meta_path:  # until then it may have been looked for without an import
                    sys.meta_path.remove(finder)
                    action()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    finder: Any = SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, finder)


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
