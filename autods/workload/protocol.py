"""The protocol of a workload, and the `model.py` that implements it.

A `model.py` is parsed and checked without running it: a typo is reported before Ray, torch or a GPU is touched.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from ..errors import InputError
from ..files import LARGEST_CODE, read_file

if TYPE_CHECKING:
    import torch

Batch = Mapping[str, Any] | Sequence[Any]
FETCH = "`hf download ORG/NAME config.json --local-dir NAME` fetches one"
FUNCTIONS = ("build_model", "build_batch")  # every workload defines both
_SIGNATURES = {
    "build_model": "build_model() -> nn.Module",
    "build_batch": "build_batch(micro_batch_size) -> dict | tuple",
}
_CONFIG = "DEEPSPEED_CONFIG"


class WorkloadError(InputError):
    """The user's code breaks the protocol of `Workload`. Raised in a rank; it reaches the driver as text.

    `own_batch` are the samples of a script's batches where nothing on its command line can change them.
    """

    own_batch: int | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and the batches that it is trained on.

    `build_model()` returns an nn.Module. Its forward returns a scalar loss, or an object or dict with `.loss`.

    `adapt_model(model)` returns the model that trains, such as one with adapters beside frozen weights. With
    `--zero-init` it gets a model that is partitioned already, and what it adds is not.

    `load_model()` returns the same model with trained weights. Training begins with it; forecasts and surveys, which
    need no values, build the other.

    `build_batch(micro_batch_size)` returns CPU tensors of the worst shape.
    A dict is passed as keywords, a tuple in order.
    The first dimension of each tensor is micro_batch_size, or a multiple of it for the patches of images.

    `build_longest_batch(micro_batch_size)` returns the largest batch that training can meet.
    Give it when build_batch draws its shapes at random.

    `build_optimizer(parameters)` returns a torch.optim.Optimizer, if the DeepSpeed config should not name one.

    `loss(model, batch)` returns a scalar tensor, if forward does not return the loss.

    `build_dataset(path)` returns what a run trains on: a map-style dataset, or a list of samples. `path` is --data, or
    None. `collate(samples)` makes a batch of some of them; without it torch's default does.

    `deepspeed_config` is the workload's base config. The driver reads it; `--base-config` takes precedence.

    `share_sequences(workload, ranks)` returns the workload of which so many neighbouring ranks share each sequence, as
    `sequence_parallel_size` of the DeepSpeed config asks for; without it the model does so itself. `join_ranks(model)`
    is called before the engine is made, and returns its `mpu`: the groups of such ranks.
    """

    build_model: Callable[[], torch.nn.Module]
    build_batch: Callable[[int], Batch]
    build_optimizer: Callable[[Any], Any] | None = None
    loss: Callable[[Any, Batch], Any] | None = None
    deepspeed_config: Mapping[str, Any] | None = None
    build_longest_batch: Callable[[int], Batch] | None = None
    build_dataset: Callable[[str | None], Any] | None = None
    collate: Callable[[Sequence[Any]], Batch] | None = None
    adapt_model: Callable[[Any], Any] | None = None
    load_model: Callable[[], Any] | None = None
    share_sequences: Callable[[Workload, int], Workload] | None = None
    join_ranks: Callable[[Any], Any] | None = None

    def with_weights(self) -> Workload:
        """The workload whose model training begins with."""
        return self if self.load_model is None else replace(self, build_model=self.load_model, load_model=None)

    def with_model(self, model: Any) -> Workload:
        """The workload whose model that trains has been built already."""
        return replace(self, build_model=lambda: model, adapt_model=None, load_model=None)

    def build(self) -> Any:
        """Build the model that trains."""
        model = self.build_model()
        return model if self.adapt_model is None else self.adapt_model(model)


# What each function of a Workload is called with.
_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "build_model": (),
    "build_batch": ("micro_batch_size",),
    "build_optimizer": ("parameters",),
    "loss": ("model", "batch"),
    "build_longest_batch": ("micro_batch_size",),
    "build_dataset": ("path",),
    "collate": ("samples",),
    "adapt_model": ("model",),
    "load_model": (),
    "share_sequences": ("workload", "ranks"),
    "join_ranks": ("model",),
}


def check_signatures(workload: Workload, *, complete: bool = True) -> None:
    """Raises WorkloadError for a function that does not take the arguments with which it is called.

    Where the workload is not `complete`, options may still give arguments that have no default.
    """
    for name, arguments in _ARGUMENTS.items():
        function = getattr(workload, name)
        try:
            signature = inspect.signature(function, follow_wrapped=False)
        except (TypeError, ValueError):  # it is None, or native code that does not tell
            continue
        try:
            (signature.bind if complete else signature.bind_partial)(*arguments)
        except TypeError as error:
            call = f"{name}({', '.join(arguments)})"
            code = getattr(getattr(function, "func", function), "__code__", None)  # of a partial, too
            raise WorkloadError(
                f"{name} cannot be called as {call}: {error}",
                place=f"{code.co_filename}:{code.co_firstlineno}" if code else None,
                hint=f"write def {call}: …",
            ) from None


def load_model_py(path: Path) -> Workload:
    """Import a `model.py` as a module and take its functions.

    Raises WorkloadError when a required name is not a function. Exceptions of the user's code are passed on.
    """
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
    for function in FUNCTIONS:
        if not callable(getattr(module, function, None)):
            raise WorkloadError(
                f"defines no function {function}", place=str(path), hint=f"add: def {_SIGNATURES[function]}"
            )
    return Workload(
        build_model=module.build_model,
        build_batch=module.build_batch,
        build_optimizer=getattr(module, "build_optimizer", None),
        loss=getattr(module, "loss", None),
        build_longest_batch=getattr(module, "build_longest_batch", None),
        build_dataset=getattr(module, "build_dataset", None),
        collate=getattr(module, "collate", None),
        adapt_model=getattr(module, "adapt_model", None),
    )


def check_model_py(path: Path) -> ast.Module:
    """Return the syntax tree of a `model.py`. Raises InputError when it lacks a function that a workload needs."""
    tree = parse_python(path)
    names = bound_names(tree)
    for function in FUNCTIONS:
        if function not in names and "*" not in names:
            raise InputError(f"defines no {function}", place=str(path), hint=f"add: def {_SIGNATURES[function]}")
    return tree


def parse_python(path: Path) -> ast.Module:
    """Return the syntax tree of a file. Raises InputError when the file is missing or not Python."""
    if os.path.isdir(path):
        hint = "give a model.py, or a Hugging Face config"
        if not os.access(path, os.R_OK | os.X_OK):
            raise InputError("cannot be read: Permission denied", place=str(path), hint=hint)
        raise InputError("is a folder without a config.json", place=str(path), hint=hint)
    hint = f"check the path; models are not looked up by name: give the path of a model.py or a config.json ({FETCH})"
    content = read_file(path, most=LARGEST_CODE, hint=hint)
    try:
        text = importlib.util.decode_source(content)  # UTF-8, or the encoding that its first lines declare
    except (UnicodeDecodeError, SyntaxError):
        raise InputError("is not a Python file", place=str(path), hint="give the path of a model.py") from None
    try:
        return ast.parse(text, filename=os.fsencode(path))
    except (RecursionError, MemoryError):  # Python's own answers to code that is nested deeply
        raise InputError(
            "is not a Python file that Python can compile: it is nested too deeply", place=str(path)
        ) from None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        source = (getattr(error, "text", None) or "").strip()
        message = getattr(error, "msg", str(error))
        place = f"{path}:{line}" if line else str(path)
        raise InputError(f"syntax error: {message}", place=place, hint=source or None) from None


def bound_names(tree: ast.Module) -> set[str]:
    """The names that importing the module binds, as far as its source shows; '*' stands for a star import."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((item.asname or item.name).split(".")[0] for item in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def read_base_config(tree: ast.Module, path: Path) -> dict[str, Any] | str | None:
    """The file's DEEPSPEED_CONFIG: a dict, or the path of a JSON file beside it; None when it has none.

    Raises InputError when the value cannot be read without running the file.
    """
    if _CONFIG not in bound_names(tree):
        return None
    writes = [node for node in ast.walk(tree) if _is_written(node, _CONFIG)]
    value = None
    for statement in tree.body if len(writes) == 1 else ():
        if isinstance(statement, ast.Assign | ast.AnnAssign) and writes[0] in ast.walk(statement):
            with contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                value = ast.literal_eval(statement.value or "")
    if isinstance(value, str):
        return str(path.parent / value)
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        if isinstance(value, dict) and json.dumps(value):  # it is sent to the ranks
            return value
    raise InputError(
        f"{_CONFIG} is neither a plain dict nor the name of a JSON file",
        place=f"{path}:{writes[-1].lineno}" if writes else str(path),
        hint="assign one of these in one place, or give the config with --base-config",
    )


_CHANGES = ("clear", "pop", "popitem", "setdefault", "update")  # methods of a dict


def _is_written(node: ast.AST, name: str) -> TypeGuard[ast.expr]:
    """Whether this node binds the name, or changes the dict that it holds, or one inside."""
    holder: ast.AST
    match node:
        case ast.Name(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del()):
            holder = node
        case ast.Call(ast.Attribute(changed, method)) if method in _CHANGES:
            holder = changed
        case _:
            return False
    while isinstance(holder, ast.Subscript):
        holder = holder.value
    return isinstance(holder, ast.Name) and holder.id == name
