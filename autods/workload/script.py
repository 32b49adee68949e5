"""A training script that nobody changed: seen by its source alone, never run here.

Which kind it is follows from what it imports. Its command line may hold placeholders, which a trial fills in.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from ..errors import InputError
from ..values import ScriptKind, WorkloadSource
from .model_py import NEEDED, names_bound, parsed

KINDS: tuple[ScriptKind, ...] = get_args(ScriptKind)

CONFIG = "ds_config"
PLACEHOLDERS = (CONFIG, "micro_batch_size", "gradient_accumulation_steps", "train_batch_size")
_PLACEHOLDER = re.compile(r"\{(" + "|".join(PLACEHOLDERS) + r")\}")

# Who calls the engine, by the names that a script imports; the first row that fits. An empty set: any name of it.
_SIGNS: tuple[tuple[ScriptKind, tuple[str, ...], frozenset[str]], ...] = (
    ("deepspeed", ("deepspeed",), frozenset({"initialize"})),
    ("lightning", ("lightning", "pytorch_lightning"), frozenset()),
    ("hf_trainer", ("transformers", "trl"), frozenset({"TrainingArguments", "HfArgumentParser"})),
    ("accelerate", ("accelerate",), frozenset()),
    ("deepspeed", ("deepspeed",), frozenset()),
)

SAID: Mapping[ScriptKind | None, str] = {
    "deepspeed": "a DeepSpeed script: it calls deepspeed.initialize",
    "hf_trainer": "a script of Hugging Face's Trainer",
    "accelerate": "a script of Hugging Face's accelerate",
    "lightning": "a Lightning script",
    None: "a script; its imports do not tell who calls deepspeed.initialize",
}

_READ_BYTES = 2**24  # of a file that the command line names: larger ones are data


@dataclass(frozen=True, slots=True)
class Imported:
    """What a file imports, anywhere in it: a module, and of that module a name, or an attribute that is used."""

    module: str
    name: str | None = None


def is_script(path: Path, argv: Sequence[str]) -> bool:
    """Whether the file is a training script rather than a model.py. Raises InputError when it is neither."""
    tree = parsed(path)
    names = names_bound(tree)
    if "*" not in names and set(NEEDED) <= names:
        return False
    if _kind(path, tree) is not None:
        return True
    if argv or not set(NEEDED) & names:
        modules = "deepspeed, transformers' Trainer, accelerate or Lightning"
        raise InputError(
            "is no workload: it defines no build_model and build_batch, and imports none of " + modules,
            where=str(path),
            mend="write them (a model.py), give the script that calls deepspeed.initialize, or say --kind script",
        )
    return False  # half a model.py: `check_file` says what is missing


def script_source(path: Path, argv: Sequence[str], kind: ScriptKind | None, folder: Path) -> WorkloadSource:
    """The reference to a script. kind: None takes the one that its imports show. The digest covers the script, what it
    imports from beside it, its arguments, and the files that they name."""
    tree = parsed(path)
    digest = hashlib.sha256(repr((tuple(argv), kind)).encode())
    for file in (path, *local_files(path, tree), *_named_files(argv, folder)):
        digest.update(f"\0{file}\0".encode())
        digest.update(file.read_bytes())
    return WorkloadSource(
        kind="script",
        path=str(path),
        name=path.stem,
        digest=digest.hexdigest()[:16],
        argv=tuple(argv),
        script_kind=kind or _kind(path, tree),
        folder=str(folder),
    )


def filled(argv: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """The arguments with their placeholders filled in; every other brace stays as it is."""
    return [_PLACEHOLDER.sub(lambda found: str(values[found[1]]), word) for word in argv]


def has_placeholder(argv: Sequence[str], name: str) -> bool:
    """Whether an argument holds `{name}`."""
    return any(f"{{{name}}}" in word for word in argv)


def launched(source: WorkloadSource) -> dict[str, object]:
    """How a script is started, for the report. takes_local_rank: the `deepspeed` launcher gives it to every script, and
    a parser that does not know it ends there."""
    text = Path(source.path).read_text() if Path(source.path).is_file() else ""
    knows = source.script_kind == "hf_trainer" or re.search(r"[\"']--local[-_]rank\b", text) is not None
    kind = source.script_kind or "deepspeed"
    return {"path": source.path, "argv": list(source.argv), "kind": kind, "takes_local_rank": knows}


def imports_of(tree: ast.Module) -> Iterator[Imported]:
    """All imports of a file, with the attributes of imported modules that it uses; relative ones are left out."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                bound[item.asname or item.name.partition(".")[0]] = item.name
                yield Imported(item.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (Imported(node.module, item.name) for item in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in bound:
            yield Imported(bound[node.value.id], node.attr)


def local_files(path: Path, tree: ast.Module) -> list[Path]:
    """The files that a script imports from beside it, and those that they import, each once."""
    found: dict[Path, None] = {}
    waiting = [tree]
    while waiting:
        for one in imports_of(waiting.pop()):
            for file in _files_of(path.parent, one):
                if file != path and file not in found:
                    found[file] = None
                    waiting += _tree(file)
    return sorted(found)


def _kind(path: Path, tree: ast.Module) -> ScriptKind | None:
    trees = [tree, *(inner for file in local_files(path, tree) for inner in _tree(file))]
    imported = {one for each in trees for one in imports_of(each)}
    for kind, packages, names in _SIGNS:
        used = {one.name for one in imported if one.module.partition(".")[0] in packages}
        if used and (not names or used & names or (kind == "hf_trainer" and any(_is_trainer(one) for one in used))):
            return kind
    return None


def _is_trainer(name: str | None) -> bool:
    return name is not None and name.endswith("Trainer")


def _tree(file: Path) -> list[ast.Module]:
    """Parsed, or nothing: what is wrong with a module that is imported is said when it is."""
    try:
        return [ast.parse(file.read_text())]
    except (OSError, ValueError, SyntaxError):
        return []


def _files_of(folder: Path, imported: Imported) -> Iterator[Path]:
    """Of a module beside the script, if it is one: a file, or a package and what is taken of it."""
    names = [imported.module] + ([f"{imported.module}.{imported.name}"] if imported.name else [])
    for name in names:
        place = folder.joinpath(*name.split("."))
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                yield file


def _named_files(argv: Sequence[str], folder: Path) -> Iterator[Path]:
    """Files of the command line, such as a DeepSpeed config of the script's own: another content is another run."""
    for word in argv:
        file = folder / word.rpartition("=")[2]
        try:
            if file.is_file() and file.stat().st_size <= _READ_BYTES:
                yield file
        except (OSError, ValueError):  # no path at all, too long for one say
            continue
