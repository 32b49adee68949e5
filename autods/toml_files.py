"""Files of data, which ship or which a person wrote: what is wrong in one is said with its name and how to mend it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from .errors import InputError
from .typed import read_as

T = TypeVar("T")


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file; InputError names the file and line when it is not one."""
    try:
        return tomllib.loads(path.read_bytes().decode())  # TOML is UTF-8, whatever the locale
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"is not TOML: {error}", where=str(path)) from None


def checked(
    kind: type[T],
    data: object,
    check: Callable[[T], None],
    *,
    name: str,
    where: str,
    mend: str,
    refusal: str | None = None,
) -> T:
    """A file's data as a `kind`, by its types and by `check`, which raises ValueError. Raises InputError.

    name: what the file holds, 'rung' say. refusal: how the message begins; None: 'is not a rung'.
    """
    try:
        file = read_as(kind, data, name=name)
        check(file)
    except ValueError as error:
        raise InputError(f"{refusal or f'is not a {name}'}: {error}", where=where, mend=mend) from None
    return file
