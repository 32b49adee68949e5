"""Ranks find each other: through a store on a socket that was bound before the fork, so that no port can be lost."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .job import RankJob


def join(job: RankJob, slot: int, store: socket.socket | None) -> None:
    """`deepspeed.init_distributed`, rank 0 serving the store on `store`."""
    import deepspeed

    if store is not None and job.local_ranks[slot] == 0:
        serve_store(store)
    deepspeed.init_distributed(dist_backend="gloo" if job.device == "cpu" else "nccl", verbose=False)


def serve_store(listening: socket.socket) -> None:
    """Give torch our listening socket, whose port is MASTER_PORT. TCPStore accepts one, the env:// rendezvous has no
    way to say it; a store on a port of the user's own gets none."""
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    real = rendezvous.TCPStore
    port = listening.getsockname()[1]

    def with_socket(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("is_master") and kwargs.get("port") == port and listening.fileno() >= 0:
            kwargs["master_listen_fd"] = listening.detach()
        return real(*args, **kwargs)

    rendezvous.TCPStore = with_socket  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """What the ranks say to each other, outside the timed steps; every rank has to call.

    agree: rank 0's word, on every rank. mean: of every rank's number. wait: until all are here.
    """

    rank: int
    world_size: int
    agree: Callable[[bool], bool]
    mean: Callable[[float], float]
    wait: Callable[[], None]


def ranks_of(job: RankJob, slot: int) -> Ranks:
    """All ranks of the job, once they have joined."""
    return Ranks(rank=job.local_ranks[slot], world_size=job.world_size, agree=_agree, mean=_mean, wait=_wait)


def _agree(word: bool) -> bool:
    from deepspeed import comm

    said = _on_device(int(word))
    comm.broadcast(said, src=0)
    return bool(said.item())


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
