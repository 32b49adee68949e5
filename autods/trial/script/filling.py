"""What the kinds share whose library takes the DeepSpeed config long before the engine, and fills in its "auto"."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ...ds_config import DEFAULT_OPTIMIZER, get, half_precision, merge, rungless
from ..exam import gathering
from .session import Session
from .users import refusal

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
    return merge(rungless(users), trials_config(session))


def as_filled(session: Session) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """For `session.merge`: what comes to the engine is the trial's config already, filled in."""

    def merged(filled: Mapping[str, Any]) -> dict[str, Any]:
        wanted, found = half_precision(session.job.ds_config), half_precision(filled)
        if not session.looks_only and wanted != found:
            raise refusal(
                f"it trains in {found or 'fp32'}, where the trial asks for {wanted or 'fp32'}",
                mend=f"say {wanted or 'fp32'} in its own arguments after --, or drop --precision",
            )
        return gathering(filled) if session.job.exam == "worst_case" else dict(filled)

    return merged


def own_of(session: Session) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """For `session.own`: what the script gave, in the precision that its library made of it."""

    def own(filled: Mapping[str, Any]) -> dict[str, Any]:
        given = {key: value for key, value in (session.given or {}).items() if key not in _PRECISIONS}
        on = (name for name in _PRECISIONS if get(filled, f"{name}.enabled") is True)
        sections = {name: merge(get(session.given or {}, name) or {}, {"enabled": True}) for name in on}
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
