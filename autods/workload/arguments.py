"""Arguments that `build_model` and `build_batch` are called with: `build_model.n_layer`, `build_batch.width`."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..values import Scalar, WorkloadSource
from .hf_config import read_config
from .workload import Workload

FUNCTIONS = ("build_model", "build_batch")


def names_of(workload: Path | Workload, source: WorkloadSource, function: str) -> tuple[str, ...] | None:
    """The arguments of a function of the workload that can be chosen; None: it takes any, or they cannot be seen.

    Of a Hugging Face config: the keys that it has, for `build_model`.
    """
    if source.kind == "hf_config":
        return tuple(read_config(Path(source.path))) if function == "build_model" else ()
    seen = _of_object(workload, function) if isinstance(workload, Workload) else _of_file(Path(source.path), function)
    return (
        None if seen is None else tuple(seen[1:] if function == "build_batch" else seen)
    )  # the first: the micro batch


def arguments_to(source: WorkloadSource, function: str) -> dict[str, Scalar]:
    """What the source gives to a function, by the argument's name."""
    parts = ((*name.partition("."), value) for name, value in source.arguments.items())
    return {name: value for given, _, name, value in parts if given == function}


def with_arguments(workload: Workload, source: WorkloadSource) -> Workload:
    """The workload whose functions are called with the source's arguments."""
    model, batch = (arguments_to(source, function) for function in FUNCTIONS)
    if not model and not batch:
        return workload
    return replace(
        workload,
        build_model=_given(workload.build_model, model),
        build_batch=_given(workload.build_batch, batch),
        build_longest_batch=_given(workload.build_longest_batch, _taken(workload.build_longest_batch, batch)),
    )


def _given(function: Callable[..., Any] | None, arguments: Mapping[str, Scalar]) -> Any:
    return function if function is None or not arguments else functools.partial(function, **arguments)


def _taken(function: Callable[..., Any] | None, arguments: Mapping[str, Scalar]) -> Mapping[str, Scalar]:
    """Those that the function has: a longest batch need not depend on all that the usual one does."""
    if function is None:
        return {}
    known = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in known}


def _of_object(workload: Workload, function: str) -> list[str] | None:
    parameters = inspect.signature(getattr(workload, function)).parameters.values()
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        return None
    return [one.name for one in parameters if one.kind is not inspect.Parameter.VAR_POSITIONAL]


def _of_file(path: Path, function: str) -> list[str] | None:
    """Seen without running the file; one that is imported or assigned has to say itself what it does not take."""
    tree = ast.parse(path.read_bytes())
    found = [node.args for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function]
    if not found or found[-1].kwarg is not None:
        return None
    return [argument.arg for argument in (*found[-1].args, *found[-1].kwonlyargs)]
