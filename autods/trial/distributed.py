"""Join the ranks of a job, and let them agree on values outside the timed steps."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .job import RankJob


def join(job: RankJob, slot: int, store: socket.socket | None) -> None:
    """Call `deepspeed.init_distributed`; rank 0 serves the rendezvous on the socket `store`.

    The socket was bound before the fork, so that no other process can take its port.
    """
    import deepspeed

    if store is not None and job.local_ranks[slot] == 0:
        serve_store(store)
    deepspeed.init_distributed(dist_backend="gloo" if job.device == "cpu" else "nccl", verbose=False)


def serve_store(listening: socket.socket) -> None:
    """Let torch's rendezvous serve its store on this socket, whose port is MASTER_PORT.

    TCPStore accepts a socket, but the env:// rendezvous has no argument for it. Stores on other ports are unchanged.
    """
    # A function of the same name hides this module among the attributes of torch.distributed.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    original = rendezvous.TCPStore
    port = listening.getsockname()[1]

    def with_socket(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("is_master") and kwargs.get("port") == port and listening.fileno() >= 0:
            kwargs["master_listen_fd"] = listening.detach()
        return original(*args, **kwargs)

    rendezvous.TCPStore = with_socket  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """How a rank communicates with the others outside the timed steps. Every rank has to make each call.

    `agree` returns rank 0's value on every rank, `mean` the mean over all ranks. `wait` returns when all ranks called.
    """

    rank: int
    world_size: int
    agree: Callable[[bool], bool]
    mean: Callable[[float], float]
    wait: Callable[[], None]


def ranks_of(job: RankJob, slot: int) -> Ranks:
    """Return all ranks of the job, after they have joined."""
    return Ranks(rank=job.local_ranks[slot], world_size=job.world_size, agree=_agree, mean=_mean, wait=_wait)


def _agree(value: bool) -> bool:
    from deepspeed import comm

    tensor = _on_device(int(value))
    comm.broadcast(tensor, src=0)
    return bool(tensor.item())


def _mean(value: float) -> float:
    from deepspeed import comm

    total = _on_device(float(value))
    comm.all_reduce(total)
    return float(total.item()) / int(comm.get_world_size())


def _wait() -> None:
    from deepspeed import comm

    comm.barrier()


def _on_device(value: float) -> Any:
    import torch
    from deepspeed.accelerator import get_accelerator

    dtype = torch.float64 if isinstance(value, float) else torch.int64
    return torch.tensor([value], dtype=dtype, device=get_accelerator().current_device_name())
