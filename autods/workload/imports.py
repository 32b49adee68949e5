"""What a Python file imports, seen without running it, and which of that are the user's own files."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Imported:
    """What a file imports, anywhere in it: a module, and of that module a name, or an attribute that is used."""

    module: str
    name: str | None = None


def imports_of(file: Path) -> tuple[Imported, ...]:
    """All absolute imports of a file, with the attributes of imported modules that it uses; none of what is no Python:
    what is wrong with a module is said when it is imported."""
    return _seen(file, _version(file))[0]


def local_files(path: Path, folders: Sequence[Path]) -> list[Path]:
    """The files that a script imports from `folders`, where absolute imports are looked for, or from beside it by
    relative ones, and those that they import, each once."""
    found: dict[Path, None] = {}
    waiting = [path]
    while waiting:
        at = waiting.pop()
        absolute, relative = _seen(at, _version(at))
        for place, one in (*((folder, one) for one in absolute for folder in folders), *relative):
            for file in _files_of(place, one):
                if file != path and file not in found:
                    found[file] = None
                    waiting.append(file)
    return sorted(found)


def _version(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(maxsize=4096)  # a package has hundreds of files, and is looked at more than once
def _seen(file: Path, version: int) -> tuple[tuple[Imported, ...], tuple[tuple[Path, Imported], ...]]:
    """Absolute imports; relative ones, each with the folder that it starts from."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (OSError, ValueError, SyntaxError):
        return (), ()
    return tuple(dict.fromkeys(_absolute(nodes))), tuple(dict.fromkeys(_relative(file, nodes)))


def _absolute(nodes: Sequence[ast.AST]) -> Iterator[Imported]:
    bound: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for item in node.names:
                bound[item.asname or item.name.partition(".")[0]] = item.name
                yield Imported(item.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (Imported(node.module, item.name) for item in node.names)
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in bound:
            yield Imported(bound[node.value.id], node.attr)


def _relative(file: Path, nodes: Sequence[ast.AST]) -> Iterator[tuple[Path, Imported]]:
    """`from ..data import build` begins above."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and 0 < node.level <= len(file.parents):
            start = file.parents[node.level - 1]
            for item in node.names:
                yield start, Imported(node.module, item.name) if node.module else Imported(item.name)


def _files_of(folder: Path, imported: Imported) -> Iterator[Path]:
    """Of a module in the folder, if it is one: a file, or a package and what is taken of it, after the packages that it
    lies in."""
    words = imported.module.split(".")
    names = [words[:end] for end in range(1, len(words) + 1)]
    names += [[*words, imported.name]] if imported.name else []
    for name in names:
        place = folder.joinpath(*name)
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                yield file
