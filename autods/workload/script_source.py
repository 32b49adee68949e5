"""Find out about a training script before it runs: its kind, its imports, its arguments."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, get_args

from ..errors import InputError
from ..types import ScriptKind, WorkloadSource
from .model_py import NEEDED, names_bound, parsed


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


_PREFIX = "module:"


def module_named(workload: Path) -> str | None:
    """'package.module' of 'module:package.module'; None: it is written otherwise."""
    said = str(workload)
    return said.removeprefix(_PREFIX) if said.startswith(_PREFIX) else None


def module_file(name: str, folder: Path) -> tuple[Path, Path]:
    """The file that `python -m name` runs when it is started in `folder`, and the folder that its top package is in.

    Raises InputError when there is none; no parent package is imported to find it.
    """
    if not all(word.isidentifier() for word in name.split(".")):
        hint = "write it as package.module, or drop -m for the path of a script"
        raise InputError("is no module's name", where=f"-m {name}", hint=hint)
    places, spec = _top(name.partition(".")[0], folder), None
    for end in range(1, name.count(".") + 2):
        part = ".".join(name.split(".")[:end])
        spec = importlib.machinery.PathFinder.find_spec(part, places) if places else None
        if spec is None:
            _refuse(name, part, folder)
        places = list(spec.submodule_search_locations or ())
    if places:  # a package: its __main__
        spec = importlib.machinery.PathFinder.find_spec(f"{name}.__main__", places)
        if spec is None:
            hint = f"give a module of it, such as -m {name}.train"
            raise InputError("is a package without a __main__.py", where=f"-m {name}", hint=hint)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise InputError("is no Python source", where=f"-m {name}", hint="give a module that is a .py file")
    file = Path(spec.origin).absolute()
    return file, file.parents[name.count(".") + bool(places)]


def _top(package: str, folder: Path) -> Sequence[str]:
    """Where the top package is looked for: as Python does with -m, in the working directory first. One that is only
    known to a hook of the import system, as in an editable install, is where that says."""
    paths = [str(folder), *(one for one in sys.path if one)]
    if importlib.machinery.PathFinder.find_spec(package, paths) is not None:
        return paths
    spec = importlib.util.find_spec(package)
    return [str(Path(one).parent) for one in (spec.submodule_search_locations or ())] if spec else []


def _refuse(name: str, part: str, folder: Path) -> NoReturn:
    where = f"-m {name}"
    if Path(folder, name).is_file():
        raise InputError("is a file, and -m takes a module's name", where=where, hint=f"drop -m: {name}")
    raise InputError(
        f"there is no module {part} in {folder}, PYTHONPATH or what is installed",
        where=where,
        hint="start it from the folder that holds the package, as python -m wants it, or set PYTHONPATH",
    )


KINDS: tuple[ScriptKind, ...] = get_args(ScriptKind)
CONFIG = "ds_config"
PLACEHOLDERS = (CONFIG, "micro_batch_size", "gradient_accumulation_steps", "train_batch_size")
_PLACEHOLDER = re.compile(r"\{(" + "|".join(PLACEHOLDERS) + r")\}")
# Who calls the engine, by the names that a script imports; the first row that fits. An empty set: any name of it.
_SIGNS: tuple[tuple[ScriptKind, tuple[str, ...], frozenset[str]], ...] = (
    ("deepspeed", ("deepspeed",), frozenset({"initialize"})),
    ("lightning", ("lightning", "pytorch_lightning"), frozenset()),
    (
        "hf_trainer",
        ("transformers", "trl", "sentence_transformers", "setfit"),
        frozenset({"TrainingArguments", "HfArgumentParser"}),
    ),
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
# Who calls the engine, where the script itself uses it; a helper of its own may still import another for a part.
_OWN_SIGNS = frozenset(
    {"initialize", "Trainer", "LightningCLI", "TrainingArguments", "HfArgumentParser", "Accelerator"}
)
_READ_BYTES = 2**24  # of a file that the command line names: larger ones are data


def is_script(path: Path, argv: Sequence[str]) -> bool:
    """Whether the file is a training script rather than a model.py. Raises InputError when it is neither."""
    tree = parsed(path)
    names = names_bound(tree)
    if "*" not in names and set(NEEDED) <= names:
        return False
    if _kind(path, local_files(path, _searched(path, Path.cwd(), None))) is not None:
        return True
    if argv or not set(NEEDED) & names:
        modules = "deepspeed, transformers' Trainer, accelerate or Lightning"
        raise InputError(
            "is no workload: it defines no build_model and build_batch, and imports none of " + modules,
            where=str(path),
            hint="write them (a model.py), give the script that calls deepspeed.initialize, or say --kind script",
        )
    return False  # half a model.py: `check_file` says what is missing


def script_source(
    path: Path,
    argv: Sequence[str],
    kind: ScriptKind | None,
    folder: Path,
    *,
    module: str | None = None,
    root: Path | None = None,
) -> WorkloadSource:
    """The reference to a script. kind: None takes the one that its imports show. module: its name, where it is started
    with `python -m`, and root the folder that its top package is in. The digest covers the script, what it imports of
    the user's own files, its arguments, and the files that they name."""
    parsed(path)
    own = local_files(path, _searched(path, folder, root))
    digest = hashlib.sha256(repr((tuple(argv), kind, *([module] if module else []))).encode())
    for file in (path, *own, *_named_files(argv, folder)):
        digest.update(f"\0{file}\0".encode())
        digest.update(file.read_bytes())
    return WorkloadSource(
        kind="script",
        path=str(path),
        name=module or path.stem,
        digest=digest.hexdigest()[:16],
        argv=tuple(argv),
        script_kind=kind or _kind(path, own),
        folder=str(folder),
        module=module,
        root=None if root is None else str(root),
    )


def all_imports(source: WorkloadSource) -> list[Imported]:
    """Of the script and of what it imports of the user's own files, each once."""
    path, root = Path(source.path), None if source.root is None else Path(source.root)
    own = local_files(path, _searched(path, Path(source.folder or path.parent), root))
    return list(dict.fromkeys(one for file in (path, *own) for one in imports_of(file)))


def filled(argv: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """The arguments with their placeholders filled in; every other brace stays as it is."""
    return [_PLACEHOLDER.sub(lambda found: str(values[found[1]]), word) for word in argv]


def has_placeholder(argv: Sequence[str], name: str) -> bool:
    """Whether an argument holds `{name}`."""
    return any(f"{{{name}}}" in word for word in argv)


def launched(source: WorkloadSource) -> dict[str, object]:
    """How a script is started, for the report. takes_local_rank: the `deepspeed` launcher gives it to every script, and
    a parser that does not know it ends there."""
    text = Path(source.path).read_bytes().decode(errors="replace") if Path(source.path).is_file() else ""
    knows = source.script_kind == "hf_trainer" or re.search(r"[\"']--local[-_]rank\b", text) is not None
    knows = knows or takes_local_rank_as_a_word(source)
    kind, module = source.script_kind or "deepspeed", {"module": source.module} if source.module else {}
    return {"path": source.path, "argv": list(source.argv), "kind": kind, "takes_local_rank": knows, **module}


def takes_local_rank_as_a_word(source: WorkloadSource) -> bool:
    """Whether its command line is read by fire or click and has a `local_rank`, which the `deepspeed` launcher gives to
    every script. A parser of argparse is asked itself, where it parses."""
    path = Path(source.path)
    if not {"fire", "click"} & {one.module.partition(".")[0] for one in imports_of(path)}:
        return False
    tree = ast.parse(path.read_bytes())
    functions = [node.args for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return any(argument.arg == "local_rank" for one in functions for argument in (*one.args, *one.kwonlyargs))


def _searched(path: Path, folder: Path, root: Path | None) -> list[Path]:
    """Where a script's own modules lie: beside it, and where PYTHONPATH names a folder of the user's project. Where
    packages are installed nothing is the user's own; one that is started from there has its relative imports."""
    given = [Path(one).absolute() for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    places = [root or path.parent, *(one for one in given if one == folder or folder in one.parents)]
    return [one for one in places if next(one.glob("*.dist-info"), None) is None]


def _kind(path: Path, own: Sequence[Path]) -> ScriptKind | None:
    """By what the script itself uses, where that decides; else by all that it imports of the user's own files."""
    first = imports_of(path)
    decisive = [one for one in first if one.name in _OWN_SIGNS or _is_trainer(one.name)]
    return _by_signs(decisive) or _by_signs([*first, *(one for file in own for one in imports_of(file))])


def _by_signs(imported: Collection[Imported]) -> ScriptKind | None:
    for kind, packages, names in _SIGNS:
        used = {one.name for one in imported if one.module.partition(".")[0] in packages}
        if used and (not names or used & names or (kind == "hf_trainer" and any(_is_trainer(one) for one in used))):
            return kind
    return None


def _is_trainer(name: str | None) -> bool:
    return name is not None and name.endswith("Trainer")


def _named_files(argv: Sequence[str], folder: Path) -> Iterator[Path]:
    """Files of the command line, such as a DeepSpeed config of the script's own: another content is another run."""
    for word in argv:
        file = folder / word.rpartition("=")[2]
        try:
            if file.is_file() and file.stat().st_size <= _READ_BYTES:
                yield file
        except (OSError, ValueError):  # no path at all, too long for one say
            continue
