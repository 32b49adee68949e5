"""The arguments that the workload's functions are called with, such as the sequence length."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..requests import Settings
from ..types import Scalar, WorkloadSource
from .hf_config import read_config
from .protocol import Workload

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


GPUS, ENV, ARGS = "gpus", "env.", "args."
LENGTHS = ("seq_len", "target_len")


def environment_of(conditions: Mapping[str, Scalar]) -> dict[str, str]:
    """Name → text of the environment variables."""
    return {name.removeprefix(ENV): str(value) for name, value in conditions.items() if name.startswith(ENV)}


def settings_under(settings: Settings, conditions: Mapping[str, Scalar]) -> Settings:
    """The settings of a trial under these conditions: its ranks, and its workload's arguments.

    Fewer ranks leave nodes alone: those that are used are full.
    """
    ranks = conditions.get(GPUS, settings.gpus)
    assert isinstance(ranks, int)
    nodes = -(-ranks // settings.ranks_per_node)
    return replace(settings, gpus=ranks, nodes=nodes, source=source_under(settings.source, conditions))


def source_under(source: WorkloadSource, conditions: Mapping[str, Scalar]) -> WorkloadSource:
    """The workload with these arguments. Others make another workload, and the digest says so."""
    lengths: dict[str, Any] = {name: conditions[name] for name in LENGTHS if name in conditions}
    arguments = {name: value for name, value in conditions.items() if name.partition(".")[0] in FUNCTIONS}
    filled = {name.removeprefix(ARGS): value for name, value in conditions.items() if name.startswith(ARGS)}
    if not lengths and not arguments and not filled:
        return source
    said = f"{source.digest} {sorted({**lengths, **arguments, **filled}.items())}"
    digest = hashlib.sha256(said.encode()).hexdigest()[:16]
    argv = source.argv
    for name, value in filled.items():
        argv = tuple(word.replace(f"{{{name}}}", str(value)) for word in argv)
    return replace(source, digest=digest, arguments={**source.arguments, **arguments}, argv=argv, **lengths)


def is_condition(name: str) -> bool:
    """Whether an axis of that name is one, and no rung or knob."""
    return name in (GPUS, *LENGTHS) or name.partition(".")[0] in (ENV[:-1], ARGS[:-1], *FUNCTIONS)
