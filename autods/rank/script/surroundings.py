"""What a script finds in a rank: a store for the rendezvous, a backend of its device, and its local rank.

CPU ranks stand in for GPUs. Calls that only select a GPU or wait for one do nothing there.
"""

from __future__ import annotations

import argparse
import inspect
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ...devices import DEVICES, find_device
from ...system.stacks import find_caller
from ..distributed import choose_store
from ..job import RankJob
from ..patching import declare, declare_all, find_original
from .user_errors import advise_arguments, script_error

_LOCAL_RANK = ("--local_rank", "--local-rank")
_BACKENDS = declare_all("torch.distributed", ("init_process_group", "new_group"), "CPU ranks use gloo for nccl")
_CUDA_CALLS = declare_all(
    "torch.cuda",
    ("set_device", "synchronize", "reset_peak_memory_stats", "ipc_collect"),
    "CPU ranks have no GPU to select or to wait for",
)
_SPAWN = declare("torch.multiprocessing.spawn", "the trial starts the ranks, not the script")
_SET_VARIABLE = declare("os._Environ.__setitem__", "the cards of a rank are chosen before its script runs")
_PARSE = declare("argparse.ArgumentParser.parse_known_args", "a parser that knows --local_rank gets it")
_INSPECTED = declare_all(
    "inspect", ("getfile", "getfullargspec", "findsource"), "a script sees the functions of the libraries as they are"
)
_PARSER_ERROR = declare("argparse.ArgumentParser.error", "a refused command line is an error of the trial")


def install(job: RankJob, slot: int, store: socket.socket | None, stand_ins: list[str]) -> None:
    """Prepare this process for a script. `stand_ins` collects its uses of GPUs that a CPU rank does without."""
    choose_store(job, store)
    if (device := find_device(job.device)).stands_in:
        for patch in _BACKENDS.values():
            patch.wrap(_replace_nccl, device.backend, stand_ins, everywhere=True)
        ignore_cuda_calls(stand_ins)
    _SET_VARIABLE.wrap(
        keep_cards, {each.visible_variable: os.environ.get(each.visible_variable or "") for each in DEVICES.values()}
    )
    _PARSE.wrap(_pass_local_rank, slot)
    for patch in _INSPECTED.values():
        patch.wrap(lambda original, value: original(find_original(value)))
    _PARSER_ERROR.install(_refuse_arguments)
    _SPAWN.install(_refuse_spawn)


def ignore_cuda_calls(stand_ins: list[str]) -> None:
    """Let calls that select a GPU or wait for one do nothing, and note each of them once with its line."""

    def ignore(name: str, original: Any, /, *args: Any, **kwargs: Any) -> None:
        note_use(stand_ins, f"torch.cuda.{name}")

    for name, patch in _CUDA_CALLS.items():
        patch.wrap(ignore, name)


def note_use(stand_ins: list[str], use: str) -> None:
    """Note a script's use of GPUs once, with its line where it is the script's."""
    line = find_caller()
    if (place := use if line is None else f"{use} ({line})") not in stand_ins:
        stand_ins.append(place)


def _replace_nccl(backend: str, stand_ins: list[str], original: Any, /, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(original).bind(*args, **kwargs)
    if "nccl" in str(given.arguments.get("backend")).lower():
        given.arguments["backend"] = backend
        note_use(stand_ins, "nccl")
    given.arguments.pop("device_id", None)
    return original(*given.args, **given.kwargs)


def keep_cards(
    chosen: Mapping[str | None, str | None], original: Any, environment: Any, name: Any, value: Any, /
) -> None:
    """Leave the visible cards as they are: they are in use already, and another value would mislead who reads it.

    `chosen` has the values that stay, by variable. A library may clear the environment and restore it.
    """
    if name not in chosen or (kept := chosen[name]) == value:
        original(environment, name, value)
        return
    if kept is not None:
        original(environment, name, kept)
    place = "" if (caller := find_caller()) is None else f"{caller}: "
    print(f"{place}{name} stays {kept!r}: autods chose the cards", file=sys.stderr)


def _pass_local_rank(
    slot: int, original: Any, parser: argparse.ArgumentParser, args: Sequence[str] | None = None, namespace: Any = None
) -> Any:
    """Pass --local_rank like the `deepspeed` launcher, but only to a parser that knows the option."""
    if args is None:
        known = [name for name in _LOCAL_RANK if name in parser._option_string_actions]
        if known and not any(word.partition("=")[0] in _LOCAL_RANK for word in sys.argv[1:]):
            args = [*sys.argv[1:], f"{known[0]}={slot}"]
    return original(parser, args, namespace)


def _refuse_arguments(parser: argparse.ArgumentParser, message: str) -> Any:
    raise script_error(f"its command line is refused: {message}", hint=advise_arguments(parser))


def _refuse_spawn(*args: Any, **kwargs: Any) -> Any:
    raise script_error(
        "it starts ranks of its own with torch.multiprocessing.spawn",
        hint="call its function once, as torchrun does: RANK, LOCAL_RANK and WORLD_SIZE are set",
    )
