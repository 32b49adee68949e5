"""What a script finds in a rank: its place among the ranks, a backend that the device has, its command line."""

from __future__ import annotations

import argparse
import functools
import re
import socket
import sys
from collections.abc import Sequence
from typing import Any

from ...workload.protocol import WorkloadError
from ..distributed import serve_on
from ..job import RankJob
from .callsite import Place, caller, refusal

# Of torch.cuda: what says which card, or waits for it, and places nothing.
_NEEDS_CUDA = ("set_device", "synchronize", "reset_peak_memory_stats", "ipc_collect")
_LOCAL_RANK = ("--local_rank", "--local-rank")
# What torch says on a machine without CUDA, whichever door the script tried.
_NO_CUDA = re.compile(
    r"not compiled with CUDA|No CUDA GPUs|NVIDIA driver|_cuda_|CUDA driver initialization|invalid device ordinal"
    r"|Attempting to deserialize object on a CUDA device|torch\.cuda is not available|CUDA is not available"
    r"|requires? (?:CUDA|an? (?:NVIDIA )?GPU)|CUDA is required|CUDA_HOME|'nvcc'"
    r"|No GPUs? (?:was |were )?(?:found|available)|No supported gpu backend|accelerator device when none is available",
    re.IGNORECASE,
)


def install(job: RankJob, slot: int, store: socket.socket | None, stood_in: list[str]) -> None:
    """For the rest of this process. stood_in: takes what the script asks of a GPU that a CPU rank does without."""
    import torch

    if store is not None and job.local_ranks[slot] == 0:
        serve_on(store)
    if job.device == "cpu":
        _speak_gloo(torch.distributed)
        _choose_no_card(torch.cuda, stood_in)
    _take_local_rank(slot)
    setattr(torch.multiprocessing, "spawn", _no_ranks_of_its_own)  # noqa: B010


def told_of_cuda(error: BaseException, place: Place | None) -> WorkloadError | None:
    """The error of a script that wants CUDA where CPU ranks stand in for GPUs, in words that help; None: another."""
    counts = isinstance(error, ZeroDivisionError) and place is not None and "device_count" in place.code
    if not isinstance(error, Exception) or not (counts or _NO_CUDA.search(str(error))):
        return None
    at = f"{place}" if place else None
    return WorkloadError(
        f"needs CUDA, and --device cpu has none: {str(error).splitlines()[0]}",
        where=at,
        hint="use engine.device or deepspeed.get_accelerator().device_name(), or run it with --device cuda",
    )


def _speak_gloo(distributed: Any) -> None:
    """CPU ranks stand in for GPUs: a script that asks for nccl means the backend of its device."""
    for name in ("init_process_group", "new_group"):
        real = getattr(distributed, name)
        place = _position(real, "backend")
        ours = functools.wraps(real)(functools.partial(_with_gloo, real, place))
        for module in (distributed, distributed.distributed_c10d):
            setattr(module, name, ours)


def _choose_no_card(cuda: Any, stood_in: list[str]) -> None:
    """A rank on the CPU has no card to choose, and nothing to wait for. What goes on to put a tensor there is refused
    at its own line."""
    for name in _NEEDS_CUDA:
        setattr(cuda, name, functools.wraps(getattr(cuda, name))(functools.partial(_done_without, name, stood_in)))


def _done_without(name: str, stood_in: list[str], *args: Any, **kwargs: Any) -> None:
    said = f"torch.cuda.{name} ({caller()})"
    if said not in stood_in:
        stood_in.append(said)


def _with_gloo(real: Any, place: int, *args: Any, **kwargs: Any) -> Any:
    words = list(args)
    if len(words) > place:
        words[place] = _gloo(words[place])
    elif "backend" in kwargs:
        kwargs["backend"] = _gloo(kwargs["backend"])
    kwargs.pop("device_id", None)
    return real(*words, **kwargs)


def _gloo(backend: Any) -> Any:
    return "gloo" if isinstance(backend, str) and "nccl" in backend.lower() else backend


def _position(function: Any, name: str) -> int:
    import inspect

    return list(inspect.signature(function).parameters).index(name)


def _take_local_rank(slot: int) -> None:
    """As the `deepspeed` launcher, which gives it to every script: only here to one whose parser knows it."""
    real = argparse.ArgumentParser.parse_known_args

    def parse(self: argparse.ArgumentParser, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        if args is None:
            known = [name for name in _LOCAL_RANK if name in self._option_string_actions]
            if known and not any(word.partition("=")[0] in _LOCAL_RANK for word in sys.argv[1:]):
                args = [*sys.argv[1:], f"{known[0]}={slot}"]
        return real(self, args, namespace)

    def refuse(self: argparse.ArgumentParser, message: str) -> Any:
        raise refusal(f"its command line is refused: {message}", hint="look at what stands after --")

    argparse.ArgumentParser.parse_known_args = parse  # type: ignore[method-assign, assignment]
    argparse.ArgumentParser.error = refuse  # type: ignore[method-assign]


def _no_ranks_of_its_own(*args: Any, **kwargs: Any) -> Any:
    raise refusal(
        "it starts ranks of its own with torch.multiprocessing.spawn",
        hint="call its function once, as torchrun does: RANK, LOCAL_RANK and WORLD_SIZE are set",
    )
