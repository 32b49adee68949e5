"""What a probe's axes must not say: what an option says already, what the workload does not take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import InputError
from ..settings import Settings
from ..values import WorkloadSource
from ..workload.arguments import FUNCTIONS
from ..workload.conditions import ARGS, LENGTHS
from ..workload.script import has_placeholder
from .axes import Value

# The arguments of a function of the workload; None: any, or nobody knows.
Arguments = Callable[[str], Sequence[str] | None]


def check_twice(
    named: Mapping[str, Sequence[Value]], source: WorkloadSource, asked: Mapping[str, Any], *, capacity: bool
) -> None:
    """An axis and an option must not say the same thing differently."""
    options = {
        "precision": asked.get("precision", "auto") != "auto",
        "seq_len": source.seq_len is not None,
        "target_len": source.target_len is not None,
        "accumulation": asked.get("global_batch") is not None,
    }
    for name, said in options.items():
        if said and name in named:
            option = "--global-batch" if name == "accumulation" else f"--{name.replace('_', '-')}"
            raise InputError(f"--vary {name}=… and {option} contradict each other", mend="drop one of the two")
    if capacity and "micro_batch" in named:
        raise InputError(
            "--capacity looks for the largest micro batch itself", mend="drop --vary micro_batch=…, or --capacity"
        )
    if "," in str(asked.get("precision", "")):
        raise InputError(
            "--precision names one; several are an axis", mend=f"give --vary precision={asked['precision']}"
        )


def check_packed(ranks: int, settings: Settings) -> None:
    """Ranks of a cell fill whole nodes, or a part of one."""
    each = settings.ranks_per_node
    if ranks > each and ranks % each:
        raise InputError(
            f"--gpus {ranks}: {settings.nodes} nodes have {each} ranks each, and these fill no whole nodes",
            mend=f"give {each} or fewer, or a multiple of {each}",
        )


def check_argument(name: str, source: WorkloadSource, arguments: Arguments) -> None:
    """Raises InputError when the workload has no such argument, and lists those that it has."""
    if source.kind == "script" or name.startswith(ARGS):
        _check_script(name, source)
        return
    function, _, argument = ("build_batch", "", name) if name in LENGTHS else name.partition(".")
    if function not in FUNCTIONS or (name in LENGTHS and source.kind == "hf_config"):
        if name in LENGTHS and (wrong := _wrong_length(name, source)) is not None:
            raise InputError(f"--vary {name}: {wrong}", where=source.path)
        return
    if name == "target_len":
        raise InputError(f"--vary {name}: it is for a Hugging Face config", mend="give --vary build_batch.target_len=…")
    known = arguments(function)
    if known is None or argument in known:
        return
    where = source.path if source.kind != "pickle" else source.name
    if source.kind == "hf_config":
        what = f"the config has no {argument!r}" if function == "build_model" else "a config makes its own batches"
        mend = "give --vary seq_len=… for its batches, or build_model.KEY with a key of the config"
    else:
        what = f"its {function} has no argument {argument!r}"
        mend = (
            f"it has {', '.join(known)}"
            if known
            else f"write def {function}({'…, ' * (function == 'build_batch')}{argument}=…)"
        )
    raise InputError(f"--vary {name}: {what}", where=where, mend=mend)


def _check_script(name: str, source: WorkloadSource) -> None:
    """A script is called by its command line, and `args.NAME` stands for {NAME} there."""
    if source.kind != "script":
        raise InputError(f"--vary {name}: it is for a training script's arguments", where=source.path)
    if name in LENGTHS or name.partition(".")[0] in FUNCTIONS or name == "checkpointing":
        raise InputError(
            f"--vary {name}: a training script decides that itself",
            where=source.path,
            mend="vary an argument of it: --vary args.length=128,256 -- --max_length {length}",
        )
    if name.startswith(ARGS) and not has_placeholder(source.argv, name.removeprefix(ARGS)):
        raise InputError(
            f"--vary {name}: its arguments hold no {{{name.removeprefix(ARGS)}}}",
            where=source.path,
            mend=f"write it where the value belongs: -- --option {{{name.removeprefix(ARGS)}}}",
        )


def _wrong_length(name: str, source: WorkloadSource) -> str | None:
    if source.task == "image-classification":
        return "images have no length in tokens"
    return f"it is for seq2seq, this is {source.task}" if name == "target_len" and source.task != "seq2seq" else None
