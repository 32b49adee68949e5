"""Put the trial's config where a trainer reads it."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from ....config.deepspeed import DEFAULT_OPTIMIZER, enabled_half_precision, get_key, merge, strip_rung_keys
from ...exam import gathering
from ..callsite import refusal
from ..session import Session

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


_PRECISIONS = ("bf16", "fp16")


def trials_config(session: Session) -> dict[str, Any]:
    """What the trial asks for. In a survey nobody knows yet whether the script brings an optimizer: none of ours."""
    config = dict(session.job.ds_config)
    if session.looks_only and is_ours(config.get("optimizer")):
        del config["optimizer"]
    return config


def in_place_of(session: Session, users: Mapping[str, Any]) -> dict[str, Any]:
    """The trial's config over the one that the script gives its library. Remembers the script's own."""
    session.given = users
    return merge(strip_rung_keys(users), trials_config(session))


def as_filled(session: Session) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """For `session.merge`: what comes to the engine is the trial's config already, filled in."""

    def merged(filled: Mapping[str, Any]) -> dict[str, Any]:
        wanted, found = enabled_half_precision(session.job.ds_config), enabled_half_precision(filled)
        if not session.looks_only and wanted != found:
            raise refusal(
                f"it trains in {found or 'fp32'}, where the trial asks for {wanted or 'fp32'}",
                hint=f"say {wanted or 'fp32'} in its own arguments after --, or drop --precision",
            )
        return gathering(filled) if session.job.exam == "worst_case" else dict(filled)

    return merged


def own_of(session: Session) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """For `session.own`: what the script gave, in the precision that its library made of it."""

    def own(filled: Mapping[str, Any]) -> dict[str, Any]:
        given = {key: value for key, value in (session.given or {}).items() if key not in _PRECISIONS}
        on = (name for name in _PRECISIONS if get_key(filled, f"{name}.enabled") is True)
        sections = {name: merge(get_key(session.given or {}, name) or {}, {"enabled": True}) for name in on}
        return {**given, **sections}

    return own


def is_ours(optimizer: Any) -> bool:
    """Whether it is the one that stands in where nobody named one."""
    if not isinstance(optimizer, Mapping):
        return False
    params = {key: value for key, value in dict(optimizer.get("params") or {}).items() if key != "torch_adam"}
    return optimizer.get("type") == DEFAULT_OPTIMIZER["type"] and params == DEFAULT_OPTIMIZER["params"]


def does_nothing(session: Session, owner: Any, *names: str, told: str = "save", gives: Any = None) -> None:
    """Methods of a library that are no part of training: noted, and left out. Another version may lack one."""
    for name in names:
        real = getattr(owner, name, None)
        if real is None:
            continue

        @functools.wraps(real)
        def left_out(*args: Any, **kwargs: Any) -> Any:
            session.insist()
            session.other("evaluate" if told == "evaluate" else "save")
            return gives() if callable(gives) else gives

        setattr(owner, name, left_out)


class Zeros(dict[str, float]):
    """The metrics of an evaluation that was left out: each is 0, so that a script can go on."""

    def __missing__(self, key: str) -> float:
        return 0.0
