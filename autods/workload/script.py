"""A training script that nobody changed: seen by its source alone, never run here.

Which kind it is follows from what it imports. Its command line may hold placeholders, which a trial fills in.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

from ..errors import InputError
from ..values import ScriptKind, WorkloadSource
from .imports import Imported, imports_of, local_files
from .model_py import NEEDED, names_bound, parsed

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
            mend="write them (a model.py), give the script that calls deepspeed.initialize, or say --kind script",
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
