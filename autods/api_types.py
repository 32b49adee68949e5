"""Types of what Python hands over. The command line has its own parser; a notebook has none."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from .errors import InputError

_WHOLE = (
    "nodes", "global_batch", "seq_len", "target_len", "seed", "max_trials", "micro_batch", "parallel_trials",
    "repeats", "steps",
)  # fmt: skip
_TEXT = ("address", "device", "precision", "task", "kind", "objective", "stop", "on")
_SWITCHES = ("forecast", "zero_init", "as_written", "largest", "capacity", "forecast_only")
_SIZES = ("gpu_memory", "host_memory", "nvme")
_PATHS = ("out", "nvme_path", "config", "experiment")
_LISTS = ("strategies", "script_args")
_NEVER_NONE = ("seed", "parallel_trials", "device", "precision", "objective", "config", *_SWITCHES, *_LISTS)


def typed(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked, numbers as Python's own. Raises InputError for a value of another type than the signature says.

    gpus of a probe, ladder and vary may be several things; what reads them checks them.
    """
    return {name: _read(name, value) for name, value in asked.items()}


def whole(name: str, value: object) -> int:
    """A whole number, numpy's too; True is none. Raises InputError."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _wrong(name, "a whole number", value)
    return int(value)


def _read(name: str, value: Any) -> Any:
    if value is None and name not in _NEVER_NONE:
        return None
    if name in _WHOLE:
        return whole(name, value)
    kinds: dict[tuple[str, ...], tuple[Any, str]] = {
        _TEXT: (str, "text"),
        _SWITCHES: (bool, "True or False"),
        _SIZES: ((str, Real), "a size such as '16GiB', or bytes"),
        _PATHS: ((str, os.PathLike), "a path"),
        ("base_config",): ((str, os.PathLike, Mapping), "a path or a dict"),
    }
    for names, (kind, words) in kinds.items():
        if name in names and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise _wrong(name, words, value)
    if name in _LISTS and (isinstance(value, str | bytes | os.PathLike) or not isinstance(value, Iterable)):
        raise _wrong(name, "a list", value)
    return os.fspath(value) if name == "config" else value


def _wrong(name: str, words: str, value: object) -> InputError:
    return InputError(f"{name}={value!r}: {words} is needed, not {type(value).__name__}")
