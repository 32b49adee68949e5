"""Checks of what the user asked that more than one command needs. Each raises InputError, none adjusts silently."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from .base_config import check_base_config, read_base_config
from .ds_config import get, half_precision, merge
from .errors import InputError
from .units import parse_bytes
from .values import WorkloadSource

Precision = Literal["auto", "bf16", "fp16", "fp32"]
Given = str | Path | Mapping[str, Any] | None


def base_of(given: Given, *, world_size: int, filled_in: bool = False) -> tuple[dict[str, Any], str]:
    """The base config, from a file or as an object, and the name that errors give it. See `check_base_config`."""
    where = str(given) if isinstance(given, (str, Path)) else "base config"
    base = read_base_config(Path(given)) if isinstance(given, (str, Path)) else _plain(given, where)
    check_base_config(base, world_size=world_size, where=where, filled_in=filled_in)
    return base, where


def asked_base(
    source: WorkloadSource, given: Given, precision: str, *, world_size: int, otherwise: str = "bf16"
) -> dict[str, Any]:
    """The workload's base config, or the one `given` in its place, with a precision. Of a script: what goes over it."""
    users = source.base_config if given is None else given
    base, where = base_of(users, world_size=world_size, filled_in=fills_in(source))
    if source.kind == "script":
        return over_script(base, precision, where)
    return with_precision(base, precision, where, otherwise=otherwise)


def size_of(given: str | int | None, option: str) -> int | None:
    """Bytes of '80GiB', or of a number."""
    if given is None:
        return None
    try:
        return parse_bytes(str(given))
    except ValueError as error:
        raise InputError(f"{option} {error}") from None


def check_ranks(gpus: int) -> int:
    """At least one."""
    if gpus < 1:
        raise InputError(f"--gpus {gpus}: at least one rank is needed", mend="give --gpus 1 or more")
    return gpus


def global_batch_of(given: int | None, base: Mapping[str, Any], ranks: int) -> int | None:
    """The global batch that was asked for, else the base config's."""
    users = base.get("train_batch_size")
    total = given if given is not None else users if isinstance(users, int) else None
    if total is not None and (total < 1 or total % ranks):
        near = max(ranks, total // ranks * ranks)
        raise InputError(
            f"--global-batch {total} cannot be split over {ranks} ranks: "
            "global batch = micro batch × accumulation × ranks",
            mend=f"give a multiple of {ranks}, such as {near} or {near + ranks}",
        )
    return total


def with_precision(base: Mapping[str, Any], precision: str, where: str, *, otherwise: str = "bf16") -> dict[str, Any]:
    """The base config with a precision in it: the user's own, else the one asked for, else `otherwise`."""
    if precision not in ("auto", "bf16", "fp16", "fp32"):
        raise InputError(f"there is no precision {precision!r}", mend="give --precision bf16, fp16 or fp32")
    users = half_precision(base)
    if precision == "auto":
        return dict(base) if users or "bf16" in base or "fp16" in base else {**base, otherwise: {"enabled": True}}
    if users and users != precision:
        raise InputError(
            f"--precision {precision}, but {users} is enabled there", where=where, mend="drop one of the two"
        )
    return dict(base) if users or precision == "fp32" else {**base, precision: {"enabled": True}}


def over_script(base: Mapping[str, Any], precision: str, where: str) -> dict[str, Any]:
    """What goes over a script's own config: its precision is its own affair unless one is asked for."""
    if precision == "auto":
        return dict(base)
    asked = with_precision(base, precision, where)
    off = {name: {"enabled": False} for name in ("bf16", "fp16") if name != half_precision(asked)}
    return merge(asked, off)


def base_of_script(
    source: WorkloadSource, own: Mapping[str, Any], asked: Mapping[str, Any], *, world_size: int
) -> dict[str, Any]:
    """The config that a script gave to its engine, under what was asked; an "auto" there means what the script said."""
    said = {key: value for key, value in asked.items() if get(asked, f"{key}.enabled") != "auto"}
    base = merge(own, said)
    where = f"the DeepSpeed config of {source.path}"
    check_base_config(base, world_size=world_size, where=where, filled_in=fills_in(source))
    return base


def fills_in(source: WorkloadSource) -> bool:
    """Whether a library stands between the config and the engine that puts values in place of "auto"."""
    return source.script_kind in ("hf_trainer", "accelerate")


def precisions_of(given: str) -> tuple[str, ...]:
    """'bf16,fp32' → both; the first is what the fit starts with, the others may win the race."""
    names = tuple(dict.fromkeys(name.strip() for name in given.split(",")))
    for name in names:
        if name not in ("bf16", "fp16", "fp32") and names != ("auto",):
            raise InputError(f"there is no precision {name!r}", mend="give --precision bf16, fp16, fp32, or bf16,fp32")
    return names


def precision_of(base: Mapping[str, Any]) -> str:
    """'bf16', 'fp16' or 'fp32', as a config says it."""
    return half_precision(base) or "fp32"


def _plain(base: Mapping[str, Any] | None, where: str) -> dict[str, Any]:
    """A copy as JSON keeps it: what is tried is what `ds_config.json` will say."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(dict(base or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError(f"cannot be written as JSON: {error}", where=where) from None
    return copy
