"""Read TOML and JSON strictly into dataclasses.

By hand and not with pydantic, which would save 24 lines. Strictly, it takes a list for a tuple only from JSON text,
where it refuses half surrogates, as in paths of another encoding, and reads 10^400 as infinity. It makes fractions of
whole numbers in float fields, and a trial's key in the journal is its text.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from .errors import InputError
from .files import read_text

T = TypeVar("T")


def read_as(kind: type[T], data: object, *, name: str | None = None) -> T:
    """Read `data` as a `kind`, a frozen dataclass. Raises ValueError that names a missing, unknown or ill-typed field.

    Fields with a default may be missing. The data's `kind` selects the member of a union of dataclasses. Messages call
    the data `name`, or by the class's name if that is None.
    """
    return cast(T, _read(kind, data, name or kind.__name__))


def read_known(kind: type[T], data: Mapping[str, Any]) -> T:
    """Read a dataclass as `read_as` does, and skip keys that it has no field for. Raises ValueError alike."""
    known = {field.name for field in fields(cast(Any, kind))}
    return read_as(kind, {name: value for name, value in data.items() if name in known})


_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _read(hint: Any, data: Any, name: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _read_union(inner, data, name)
    if is_dataclass(hint):
        return _read_dataclass(hint, data, name)
    if origin is tuple:
        _expect(isinstance(data, Sequence) and not isinstance(data, str), data, name, "a list")
        return tuple(_read(inner[0], item, f"{name}[{i}]") for i, item in enumerate(data))
    if origin is Mapping:
        _expect(isinstance(data, Mapping), data, name, "a table")
        return {_read(inner[0], key, name): _read(inner[1], item, f"{name}.{key}") for key, item in data.items()}
    if _is_a(hint, data):
        return data
    return _expect(False, data, name, f"one of {', '.join(map(str, inner))}" if inner else _WORDS[hint])


def _is_a(kind: Any, data: object) -> bool:
    """Whether the data is of a plain type. True is an int to Python, and 1 is a number."""
    if get_origin(kind) is Literal:
        return (type(data), data) in [(type(each), each) for each in get_args(kind)]
    if kind in (int, float):
        return isinstance(data, (int, kind)) and not isinstance(data, bool)
    return kind is Any or isinstance(data, kind)


def _expect(right: bool, data: Any, name: str, wanted: str) -> Any:
    if not right:
        raise ValueError(f"{name} is {data!r:.80}, not {wanted}")
    return data


def _read_union(options: tuple[Any, ...], data: Any, name: str) -> Any:
    if data is None and NoneType in options:
        return None
    options = tuple(option for option in options if option is not NoneType)
    if len(options) == 1:
        return _read(options[0], data, name)
    if all(is_dataclass(option) for option in options):
        by_kind = {get_args(_field_types(option)["kind"])[0]: option for option in options}
        tag = data.get("kind") if isinstance(data, Mapping) else None
        _expect(isinstance(tag, str) and tag in by_kind, tag, f"{name}.kind", f"one of {', '.join(by_kind)}")
        return _read(by_kind[tag], data, name)
    words = " or ".join(_WORDS.get(option, str(option)) for option in options)
    return _expect(any(_is_a(option, data) for option in options), data, name, words)


def _read_dataclass(kind: Any, data: Any, name: str) -> Any:
    _expect(isinstance(data, Mapping), data, name, "a table")
    hints = _field_types(kind)
    unknown = [str(key) for key in data if key not in hints]
    if unknown:
        raise ValueError(f"{name} has the unknown key {unknown[0]!r}; it has {', '.join(hints)}")
    for field in fields(kind):
        if field.name not in data and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{name} lacks {field.name!r}")
    return kind(**{key: _read(hints[key], item, f"{name}.{key}") for key, item in data.items()})


@cache
def _field_types(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")


def check_name(name: str) -> None:
    """Raises ValueError for a name that cannot be that of a folder and stand in a list, such as '../x' or 'a,b'."""
    if not _NAME.fullmatch(name):
        problem = f"its name {name!r:.80} is not letters, digits and . _ + -, beginning with a letter or digit"
        raise ValueError(f"{problem}, 64 of them at most" if len(name) > 64 else problem)


_DEEPEST = 64  # tables and lists in one another
_LARGEST_WHOLE = 2**63
_LARGEST_TOML = 2**20  # bytes
_LONG_KEY = re.compile(rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{_DEEPEST + 1}}}""")


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file of the types that JSON has. Raises InputError with file and line."""
    text = read_text(path, most=_LARGEST_TOML)
    try:
        if _LONG_KEY.search(text):  # tomllib would take hours for one of 100,000 parts
            raise ValueError(f"it is nested more than {_DEEPEST} deep")
        data = tomllib.loads(text)
        check_plain(data)
    except RecursionError:
        raise InputError("is nested too deeply", place=str(path)) from None
    except ValueError as error:
        raise InputError(f"is not TOML: {error}", place=str(path)) from None
    return data


def parse_json(text: str, *, place: str, hint: str | None = None, finite: bool = False, **hooks: Any) -> Any:
    """Read JSON of a user's file. Raises InputError with line and column.

    Infinity and NaN are allowed unless `finite`. `hooks` are those of `json.loads`.
    """
    try:
        data = json.loads(text, **hooks)
        check_plain(data, finite=finite)
    except json.JSONDecodeError as error:
        place = f"{place}:{error.lineno}:{error.colno}"
        raise InputError(f"is not JSON: {error.msg}", place=place, hint=hint) from None
    except RecursionError:
        raise InputError("is nested too deeply", place=place, hint=hint) from None
    except ValueError as error:
        error = ValueError("a number of thousands of digits") if "integer string conv" in str(error) else error
        raise InputError(f"cannot be used: {error}", place=place, hint=hint) from None
    return data


def check_plain(data: object, *, finite: bool = True) -> None:
    """Raises ValueError for data that would end the code that handles it: nested deeply, or of enormous numbers.

    Infinity and NaN are allowed unless `finite`, other types than those of JSON are not.
    """
    waiting: list[tuple[object, int]] = [(data, 0)]
    while waiting:
        value, depth = waiting.pop()
        if depth > _DEEPEST:
            raise ValueError(f"it is nested more than {_DEEPEST} deep")
        match value:
            case Mapping():
                waiting += [(item, depth + 1) for item in value.values()]
            case list() | tuple():
                waiting += [(item, depth + 1) for item in value]
            case bool() | str() | None:
                pass
            case int() if abs(value) >= _LARGEST_WHOLE:
                raise ValueError(f"a whole number of {value.bit_length()} bits; 64 are the most")
            case float() if finite and not math.isfinite(value):
                raise ValueError(f"{value} is no finite number")
            case int() | float():
                pass
            case _:
                raise ValueError(f"{value!s:.80} is {type(value).__name__}, which a config cannot hold")


def read_toml_as(
    kind: type[T],
    path: Path,
    *,
    name: str,
    check: Callable[[T], None] = lambda file: None,
    hint: str = "reinstall autods",
    refusal: str | None = None,
) -> T:
    """Read a TOML file as a `kind`. Raises InputError for wrong types, and where `check` raises ValueError.

    `name` is the content of the file, such as 'rung'. The message begins with `refusal`, or else with 'is not a rung'.
    """
    data = read_toml(path)
    try:
        file = read_as(kind, data, name=name)
        check(file)
    except ValueError as error:
        article = "an" if name[0] in "aeiou" else "a"
        problem = f"{refusal or f'is not {article} {name}'}: {error}"
        raise InputError(problem, place=str(path), hint=hint) from None
    return file
