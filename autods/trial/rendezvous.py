"""Ranks find each other: through a store on a socket that was bound before the fork, so that no port can be lost."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable
from typing import Any

from .spec import RankJob


def join(job: RankJob, slot: int, store: socket.socket | None) -> None:
    """`deepspeed.init_distributed`, rank 0 serving the store on `store`."""
    import deepspeed

    if store is not None and job.local_ranks[slot] == 0:
        _serve_on(store)
    deepspeed.init_distributed(dist_backend="gloo" if job.device == "cpu" else "nccl", verbose=False)


def _serve_on(listening: socket.socket) -> None:
    """Give torch our listening socket. TCPStore accepts one, the env:// rendezvous has no way to say it."""
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    real = rendezvous.TCPStore

    def with_socket(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("is_master"):
            kwargs["master_listen_fd"] = listening.detach()
        return real(*args, **kwargs)

    rendezvous.TCPStore = with_socket  # type: ignore[attr-defined]


def agreement() -> Callable[[bool], bool]:
    """A function that takes rank 0's word to every rank; called outside the timed steps."""

    def agree(word: bool) -> bool:
        import torch
        from deepspeed import comm
        from deepspeed.accelerator import get_accelerator

        said = torch.tensor([int(word)], device=get_accelerator().current_device_name())
        comm.broadcast(said, src=0)
        return bool(said.item())

    return agree
