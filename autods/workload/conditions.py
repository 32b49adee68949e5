"""What a probe varies beside rung and knobs, as a trial carries it: plain names and values.

gpus: ranks. seq_len, target_len, build_model.NAME, build_batch.NAME: of the workload. args.NAME: what stands for {NAME}
in a training script's arguments. env.NAME: an environment variable of the ranks and of the process that forks them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..settings import Settings
from ..values import Scalar, WorkloadSource
from .arguments import FUNCTIONS

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
