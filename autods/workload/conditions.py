"""Conditions of a workload: its functions' arguments, sequence lengths, ranks and environment variables.

`autods probe` varies them as axes. Their names are 'gpus', 'seq_len', 'target_len', 'env.NAME', 'args.NAME',
'build_model.NAME' and 'build_batch.NAME'.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config.settings import Settings
from ..types import Scalar, WorkloadSource
from .hf_config import read_config
from .protocol import FUNCTIONS, Workload

GPUS, ENV, ARGS = "gpus", "env.", "args."
LENGTHS = ("seq_len", "target_len")


def is_condition(name: str) -> bool:
    """Whether an axis of that name is a condition, not a rung or a knob."""
    return name in (GPUS, *LENGTHS) or name.partition(".")[0] in (ENV[:-1], ARGS[:-1], *FUNCTIONS)


def environment_variables(conditions: Mapping[str, Scalar]) -> dict[str, str]:
    """The environment variables among the conditions, by name."""
    return {name.removeprefix(ENV): str(value) for name, value in conditions.items() if name.startswith(ENV)}


def apply_conditions(settings: Settings, conditions: Mapping[str, Scalar]) -> Settings:
    """The settings of a trial under these conditions. Fewer ranks fill fewer nodes."""
    ranks = conditions.get(GPUS, settings.gpus)
    assert isinstance(ranks, int)
    nodes = -(-ranks // settings.ranks_per_node)
    return replace(settings, gpus=ranks, nodes=nodes, source=apply_to_source(settings.source, conditions))


def apply_to_source(source: WorkloadSource, conditions: Mapping[str, Scalar]) -> WorkloadSource:
    """The workload under these conditions. Any change of its arguments or lengths changes its digest."""
    lengths: dict[str, Any] = {name: conditions[name] for name in LENGTHS if name in conditions}
    arguments = {name: value for name, value in conditions.items() if name.partition(".")[0] in FUNCTIONS}
    filled = {name.removeprefix(ARGS): value for name, value in conditions.items() if name.startswith(ARGS)}
    if not lengths and not arguments and not filled:
        return source
    changes = f"{source.digest} {sorted({**lengths, **arguments, **filled}.items())}"
    digest = hashlib.sha256(changes.encode()).hexdigest()[:16]
    argv = source.argv
    for name, value in filled.items():
        argv = tuple(word.replace(f"{{{name}}}", str(value)) for word in argv)
    return replace(source, digest=digest, arguments={**source.arguments, **arguments}, argv=argv, **lengths)


def argument_names(workload: Path | Workload, source: WorkloadSource, function: str) -> tuple[str, ...] | None:
    """The arguments of build_model or build_batch that can be varied; the micro batch size is not among them.

    For a Hugging Face config, the keys of the config count as arguments of build_model. None means that the function
    takes any argument, or that its source does not show them.
    """
    if source.kind == "hf_config":
        return tuple(read_config(Path(source.path))) if function == "build_model" else ()
    if isinstance(workload, Workload):
        names = _names_in_signature(getattr(workload, function))
    else:
        names = _names_in_file(Path(source.path), function)
    if names is None:
        return None
    return tuple(names[1:] if function == "build_batch" else names)


def bind_arguments(workload: Workload, source: WorkloadSource) -> Workload:
    """The workload with the source's arguments and sequence length bound to its functions."""
    model = _arguments_for(source, "build_model")
    batch = _arguments_for(source, "build_batch")
    if source.seq_len is not None:
        batch = {"seq_len": source.seq_len, **batch}
    return replace(
        workload,
        build_model=_bind(workload.build_model, model),
        build_batch=_bind(workload.build_batch, batch),
        build_longest_batch=_bind(workload.build_longest_batch, _accepted(workload.build_longest_batch, batch)),
    )


def _arguments_for(source: WorkloadSource, function: str) -> dict[str, Scalar]:
    prefix = f"{function}."
    return {name.removeprefix(prefix): value for name, value in source.arguments.items() if name.startswith(prefix)}


def _bind(function: Callable[..., Any] | None, arguments: Mapping[str, Scalar]) -> Any:
    return function if function is None or not arguments else functools.partial(function, **arguments)


def _accepted(function: Callable[..., Any] | None, arguments: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The arguments that the function declares: the longest batch may depend on fewer of them than build_batch."""
    if function is None:
        return {}
    declared = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in declared}


def _names_in_signature(function: Callable[..., Any]) -> list[str] | None:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_POSITIONAL]


def _names_in_file(path: Path, function: str) -> list[str] | None:
    """Read the signature without running the file. None for a function that is imported or assigned."""
    tree = ast.parse(path.read_bytes())
    signatures = [node.args for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function]
    if not signatures or signatures[-1].kwarg is not None:
        return None
    return [argument.arg for argument in (*signatures[-1].args, *signatures[-1].kwonlyargs)]
