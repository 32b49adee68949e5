"""What a script finds in a rank: a store for the rendezvous, a backend of its device, and its local rank.

CPU ranks stand in for GPUs. Calls that only select a GPU or wait for one do nothing there.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import socket
import sys
from collections.abc import Sequence
from typing import Any

from ..distributed import serve_store
from ..job import RankJob
from ..patching import Patch, declare, declare_all
from .user_errors import find_caller, script_error

_LOCAL_RANK = ("--local_rank", "--local-rank")
_BACKENDS = declare_all("torch.distributed", ("init_process_group", "new_group"), "CPU ranks use gloo for nccl")
_CUDA_CALLS = declare_all(
    "torch.cuda",
    ("set_device", "synchronize", "reset_peak_memory_stats", "ipc_collect"),
    "CPU ranks have no GPU to select or to wait for",
)
_SPAWN = declare("torch.multiprocessing.spawn", "the trial starts the ranks, not the script")
_PARSE = declare("argparse.ArgumentParser.parse_known_args", "a parser that knows --local_rank gets it")
_PARSER_ERROR = declare("argparse.ArgumentParser.error", "a refused command line is an error of the trial")


def install(job: RankJob, slot: int, store: socket.socket | None, stand_ins: list[str]) -> None:
    """Prepare this process for a script. `stand_ins` collects the calls of torch.cuda that do nothing here."""
    if store is not None and job.local_ranks[slot] == 0:
        serve_store(store)
    if job.device == "cpu":
        for patch in _BACKENDS.values():
            _replace_nccl(patch)
        ignore_cuda_calls(stand_ins)
    _pass_local_rank(slot)
    _SPAWN.install(_refuse_spawn)


def ignore_cuda_calls(stand_ins: list[str]) -> None:
    """Let calls that select a GPU or wait for one do nothing, and note each of them once with its line."""

    def ignore(name: str, *args: Any, **kwargs: Any) -> None:
        call = f"torch.cuda.{name} ({find_caller()})"
        if call not in stand_ins:
            stand_ins.append(call)

    for name, patch in _CUDA_CALLS.items():
        patch.install(functools.wraps(patch.original())(functools.partial(ignore, name)))


def _replace_nccl(patch: Patch) -> None:
    original = patch.original()
    position = list(inspect.signature(original).parameters).index("backend")

    @functools.wraps(original)
    def with_gloo(*args: Any, **kwargs: Any) -> Any:
        positional = list(args)
        if len(positional) > position:
            positional[position] = _gloo_for(positional[position])
        elif "backend" in kwargs:
            kwargs["backend"] = _gloo_for(kwargs["backend"])
        kwargs.pop("device_id", None)
        return original(*positional, **kwargs)

    patch.install(with_gloo, everywhere=True)


def _gloo_for(backend: Any) -> Any:
    return "gloo" if isinstance(backend, str) and "nccl" in backend.lower() else backend


def _pass_local_rank(slot: int) -> None:
    """Pass --local_rank like the `deepspeed` launcher, but only to a parser that knows the option."""
    original = _PARSE.original()

    def parse(self: argparse.ArgumentParser, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        if args is None:
            known = [name for name in _LOCAL_RANK if name in self._option_string_actions]
            if known and not any(word.partition("=")[0] in _LOCAL_RANK for word in sys.argv[1:]):
                args = [*sys.argv[1:], f"{known[0]}={slot}"]
        return original(self, args, namespace)

    def refuse(self: argparse.ArgumentParser, message: str) -> Any:
        raise script_error(f"its command line is refused: {message}", hint="check the arguments after --")

    _PARSE.install(parse)
    _PARSER_ERROR.install(refuse)


def _refuse_spawn(*args: Any, **kwargs: Any) -> Any:
    raise script_error(
        "it starts ranks of its own with torch.multiprocessing.spawn",
        hint="call its function once, as torchrun does: RANK, LOCAL_RANK and WORLD_SIZE are set",
    )
