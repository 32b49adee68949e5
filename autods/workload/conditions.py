"""Conditions of a workload: its functions' arguments, sequence lengths, ranks and environment variables.

`autods probe` varies them as axes. Their names are 'gpus', 'seq_len', 'target_len', 'env.NAME', 'args.NAME',
'build_model.NAME' and 'build_batch.NAME'.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config.settings import Settings
from ..types import Scalar, WorkloadSource
from .hf_config import read_config
from .protocol import FUNCTIONS, Workload, parse_python

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
    changes = {**lengths, **arguments, **filled}
    if not changes:
        return source
    digest = hashlib.sha256(f"{source.digest} {sorted(changes.items())}".encode()).hexdigest()[:16]
    argv = source.argv
    for name, value in filled.items():
        argv = tuple(word.replace(f"{{{name}}}", str(value)) for word in argv)
    return replace(source, digest=digest, arguments={**source.arguments, **arguments}, argv=argv, **lengths)


def argument_names(workload: Path | Workload, source: WorkloadSource, function: str) -> tuple[str, ...] | None:
    """The arguments of build_model or build_batch that can be varied; the micro batch size is not among them.

    For a Hugging Face config, the keys of the config count as arguments of build_model. None means that the function
    takes any argument, or that neither its source nor its signature shows them.
    """
    if source.form.is_model_config:
        return tuple(read_config(Path(source.path))) if function == "build_model" else ()
    if isinstance(workload, Workload):
        try:
            parameters = inspect.signature(getattr(workload, function)).parameters.values()
        except (TypeError, ValueError):  # native code that does not tell
            return None
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        names = [parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_POSITIONAL]
    else:
        tree = parse_python(Path(source.path))
        definitions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function]
        if not definitions:  # it is imported or assigned
            return None
        signature = definitions[-1].args
        takes_any = signature.kwarg is not None
        names = [argument.arg for argument in (*signature.args, *signature.kwonlyargs)]
    if takes_any:
        return None
    return tuple(names[1:] if function == "build_batch" else names)


def bind_arguments(workload: Workload, source: WorkloadSource) -> Workload:
    """The workload with the source's arguments and sequence length bound to its functions."""
    by_function: dict[str, dict[str, Any]] = {function: {} for function in FUNCTIONS}
    if source.seq_len is not None:
        by_function["build_batch"]["seq_len"] = source.seq_len
    for condition, value in source.arguments.items():
        function, _, name = condition.partition(".")
        by_function[function][name] = value
    model, batch = by_function["build_model"], by_function["build_batch"]
    build_longest_batch = workload.build_longest_batch
    if build_longest_batch is not None:  # it may depend on fewer arguments than build_batch
        declared = inspect.signature(build_longest_batch).parameters
        accepted: dict[str, Any] = {name: value for name, value in batch.items() if name in declared}
        build_longest_batch = functools.partial(build_longest_batch, **accepted)
    return replace(
        workload,
        build_model=functools.partial(workload.build_model, **model),
        build_batch=functools.partial(workload.build_batch, **batch),
        build_longest_batch=build_longest_batch,
    )
