"""A `model.py`: checked without running it, so that a typo is found before Ray, torch or a GPU is touched."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Any, TypeGuard

from ..errors import InputError
from .protocol import Workload, WorkloadError

NEEDED = ("build_model", "build_batch")
_CONFIG = "DEEPSPEED_CONFIG"
_ONE_TARGET = (ast.AnnAssign, ast.AugAssign)


def check_file(path: Path) -> ast.Module:
    """The parsed file. Raises InputError when it is missing, no Python, or does not define what a workload needs."""
    tree = parsed(path)
    names = names_bound(tree)
    for name in NEEDED:
        if name not in names and "*" not in names:
            form = (
                "build_model() -> nn.Module"
                if name == "build_model"
                else "build_batch(micro_batch_size) -> dict | tuple"
            )
            raise InputError(f"defines no {name}", where=str(path), hint=f"add: def {form}")
    return tree


def parsed(path: Path) -> ast.Module:
    """The file as a tree. Raises InputError when it is missing or no Python."""
    try:
        text = importlib.util.decode_source(path.read_bytes())  # UTF-8, or what its first lines declare
    except IsADirectoryError:
        raise InputError(
            "is a folder without a config.json", where=str(path), hint="give a model.py, or a Hugging Face config"
        ) from None
    except (UnicodeDecodeError, SyntaxError):
        raise InputError("is not a Python file", where=str(path), hint="give the path of a model.py") from None
    except OSError as error:
        hint = "check the path; models are not looked up by name: give the path of a model.py or a config.json"
        raise InputError(f"cannot be read: {error.strerror}", where=str(path), hint=hint) from None
    try:
        return ast.parse(text, filename=str(path))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f"{path}:{line}" if line else str(path)
        source = (getattr(error, "text", None) or "").strip()
        message = getattr(error, "msg", str(error))
        raise InputError(f"syntax error: {message}", where=where, hint=source or None) from None


def base_config_of(tree: ast.Module, path: Path) -> dict[str, Any] | str | None:
    """What the file says of DEEPSPEED_CONFIG: an object, or a JSON file beside it. Raises InputError if it cannot be
    seen without running the file."""
    if _CONFIG not in names_bound(tree):
        return None
    said = [node for node in ast.walk(tree) if _says_config(node)]
    value = None
    if len(said) == 1 and said[0] in tree.body:
        try:
            value = ast.literal_eval(said[0].value or "")
        except (ValueError, TypeError):
            value = None
    if isinstance(value, str):
        return str(path.parent / value)
    if isinstance(value, dict):
        return value
    raise InputError(
        f"{_CONFIG} is neither a plain dict nor the name of a JSON file",
        where=f"{path}:{said[-1].lineno}" if said else str(path),
        hint="write it as one, in one place, or give the config with --base-config",
    )


def _says_config(node: ast.AST) -> TypeGuard[ast.Assign | ast.AnnAssign]:
    """Whether it gives DEEPSPEED_CONFIG, or a key of it, a value."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, _ONE_TARGET) else []
    inner = [target.value if isinstance(target, ast.Subscript) else target for target in targets]
    return any(isinstance(one, ast.Name) and one.id == _CONFIG for one in inner)


def names_bound(tree: ast.Module) -> set[str]:
    """Names that importing the module binds, as far as can be seen without running it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((item.asname or item.name).split(".")[0] for item in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def load_file(path: Path) -> Workload:
    """Import the file as a module and take its functions. What the user's code raises is passed on."""
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = path.stem if path.stem not in sys.modules else f"autods_workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    for needed in NEEDED:
        if not callable(getattr(module, needed, None)):
            raise WorkloadError(
                f"defines no function {needed}", where=str(path), hint="see the README for the contract"
            )
    return Workload(
        build_model=module.build_model,
        build_batch=module.build_batch,
        build_optimizer=getattr(module, "build_optimizer", None),
        loss=getattr(module, "loss", None),
        build_longest_batch=getattr(module, "build_longest_batch", None),
    )
