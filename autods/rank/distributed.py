"""Join the ranks of a job, let them agree on values, and count and time the collectives of an optimizer step.

DeepSpeed's comms_logger (0.19.8) does not serve for counting. It synchronises the device after every collective, so
that nothing overlaps. Its timer is never reset (207 s for a run of 13 s). It takes a rank's part of a gather for the
whole, and misses coalesced collectives. Counting in the methods of DeepSpeed's backend costs some microseconds a call.
"""

from __future__ import annotations

import collections
import functools
import importlib
import inspect
import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..devices import find_device
from ..types import Collective, Communication
from .job import RankJob
from .patching import declare

_CREATE_STORE = declare("torch.distributed.rendezvous._create_c10d_store", "ranks meet in a private file")
_TCP_STORE = declare("torch.distributed.rendezvous.TCPStore", "rank 0 has a socket for it already")


def join(job: RankJob, store: socket.socket | None) -> None:
    """Call `deepspeed.init_distributed`. `store` is for `choose_store`."""
    import deepspeed

    choose_store(job, store)
    deepspeed.init_distributed(dist_backend=find_device(job.device).backend, verbose=False)


def choose_store(job: RankJob, listening: socket.socket | None) -> None:
    """Choose where torch's rendezvous by env:// and tcp:// keeps its keys, for the rest of this process.

    Ranks of one machine meet in a file in `job.private`, which no other user can open. A TCPStore takes keys from
    anyone who connects to its port, and lists all of them on demand, so that a random prefix would not help. The file
    serves NCCL, too: its watchdogs and its flight recorder need set, get, wait, add, delete and check, and torch's own
    tests run them on a FileStore. Only queues and append need TCP; scripts hardly use them.

    Ranks of several nodes have a TCPStore: not every file system that nodes share has locks. Rank 0 serves it on the
    socket `listening`, whose port is MASTER_PORT and which was bound before the fork, so that nobody can take the port.
    """
    if job.is_whole:
        _CREATE_STORE.wrap(_open_private_store, job, collections.Counter())
    elif listening is not None:
        _TCP_STORE.wrap(_serve_on, listening)


def _open_private_store(job: RankJob, opened: collections.Counter[int], original: Any, /, *args: Any, **kw: Any) -> Any:
    """A store of all ranks is in a file; a script may open others.

    `opened` counts the stores by port: ranks that destroy their process group and join again must not find old keys.
    """
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    given = inspect.signature(original).bind(*args, **kw).arguments
    if given["world_size"] != job.world_size:
        return original(*args, **kw)
    port = given["port"]
    # Without a number of users, none of them removes the file while others wait in it; it goes with the folder.
    store = FileStore(f"{job.private}/store-{port}-{opened[port]}", -1)
    opened[port] += 1
    store.set_timeout(given["timeout"])
    return store


def _serve_on(listening: socket.socket, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    is_free = listening.fileno() >= 0  # no store has taken it yet
    if is_free and kwargs.get("is_master") and kwargs.get("port") == listening.getsockname()[1]:
        kwargs["master_listen_fd"] = listening.detach()
    return original(*args, **kwargs)


_REDUCTIONS, _REDUCE_S = 6, 2.0


@dataclass(frozen=True, slots=True)
class Ranks:
    """How a rank communicates with the others outside the timed steps. Every rank has to make each call."""

    rank: int
    world_size: int

    def agree(self, value: bool) -> bool:
        """Return rank 0's value on every rank."""
        if self.world_size == 1:
            return value
        from deepspeed import comm

        tensor = _on_device(int(value))
        comm.broadcast(tensor, src=0)
        return bool(tensor.item())

    def mean(self, value: float) -> float:
        """Return the mean over all ranks."""
        if self.world_size == 1:
            return value
        from deepspeed import comm

        total = _on_device(float(value))
        comm.all_reduce(total)
        return float(total.item()) / self.world_size

    def wait(self) -> None:
        """Return when all ranks called."""
        if self.world_size > 1:
            from deepspeed import comm

            comm.barrier()

    def measure_all_reduce(self, size: int, synchronize: Callable[[], None]) -> float:
        """Return the bytes a second that a rank sends in an all-reduce of `size` bytes, nccl-tests' bus bandwidth.

        The best of some counts, since the first ones open connections. They end early where the links are slow.
        """
        import torch
        from deepspeed import comm
        from deepspeed.accelerator import get_accelerator

        values = torch.zeros(size // 4, device=get_accelerator().current_device_name())
        began, best_s = time.perf_counter(), math.inf
        for _ in range(_REDUCTIONS):
            self.wait()
            synchronize()
            one_began = time.perf_counter()
            comm.all_reduce(values)
            synchronize()
            best_s = min(best_s, time.perf_counter() - one_began)
            if self.agree(time.perf_counter() - began > _REDUCE_S):
                break
        return size * _SENT_SHARE["reduced"](self.world_size) / best_s


def _on_device(value: float) -> Any:
    import torch
    from deepspeed.accelerator import get_accelerator

    dtype = torch.float64 if isinstance(value, float) else torch.int64
    return torch.tensor([value], dtype=dtype, device=get_accelerator().current_device_name())


# The share of a collective's bytes that a rank sends by the ring algorithm, by the number of ranks; as in nccl-tests.
_SENT_SHARE: Mapping[str, Callable[[int], float]] = {
    "reduced": lambda ranks: 2 * (ranks - 1) / ranks,
    "gathered": lambda ranks: (ranks - 1) / ranks,
    "passed on": lambda ranks: float(ranks > 1),
    "received": lambda ranks: 0.0,
}


class _Op(NamedTuple):
    """A method of DeepSpeed's backend.

    `whole` and `position` are the name and place of the argument that is as large as all ranks' parts together. `waits`
    is whether a rank can wait for it at once without a deadlock.
    """

    name: str
    whole: str
    position: int
    sends: str
    waits: bool = True


_OPS: Mapping[str, _Op] = {
    "all_reduce": _Op("all_reduce", "tensor", 0, "reduced"),
    "all_reduce_coalesced": _Op("all_reduce", "tensors", 0, "reduced"),
    "inference_all_reduce": _Op("all_reduce", "tensor", 0, "reduced"),
    "reduce": _Op("reduce", "tensor", 0, "passed on"),
    "reduce_scatter": _Op("reduce_scatter", "input_list", 1, "gathered"),
    "reduce_scatter_tensor": _Op("reduce_scatter", "input_tensor", 1, "gathered"),
    "all_gather": _Op("all_gather", "tensor_list", 0, "gathered"),
    "all_gather_into_tensor": _Op("all_gather", "output_tensor", 0, "gathered"),
    "all_gather_coalesced": _Op("all_gather", "output_tensors", 0, "gathered"),
    "all_to_all": _Op("all_to_all", "input_tensor_list", 1, "gathered"),
    "all_to_all_single": _Op("all_to_all", "input", 1, "gathered"),
    "broadcast": _Op("broadcast", "tensor", 0, "passed on"),
    "gather": _Op("gather", "tensor", 0, "passed on"),
    "scatter": _Op("scatter", "tensor", 0, "passed on"),
    "send": _Op("send", "tensor", 0, "passed on", waits=False),
    "isend": _Op("send", "tensor", 0, "passed on", waits=False),
    "recv": _Op("recv", "tensor", 0, "received", waits=False),
    "irecv": _Op("recv", "tensor", 0, "received", waits=False),
}


@dataclass(slots=True)
class Traffic:
    """Counts the collectives of each optimizer step; `describe` returns those of the last one."""

    synchronize: Callable[[], None]
    _counts: dict[str, Collective] = field(default_factory=dict)
    _counting: bool = False
    _alone: bool = False
    _step_s: float | None = None
    _world_size: int = 1

    def listen(self, backend: Any = None) -> None:
        """Count the collectives of this backend, or DeepSpeed's, from here on; the ranks must have joined."""
        backend = backend or importlib.import_module("deepspeed.comm.comm").cdb
        self._world_size = int(backend.get_world_size())
        for method, op in _OPS.items():
            original = getattr(backend, method, None)
            if original is not None:
                setattr(backend, method, functools.wraps(original)(functools.partial(self._count, original, op)))

    def begin(self) -> None:
        """Begin a step, unless one runs."""
        if not self._counting:
            self._counts, self._step_s, self._counting = {}, None, True

    def end(self) -> None:
        """End the step."""
        self._counting = self._alone = False

    @contextmanager
    def step(self, *, alone: bool = False) -> Iterator[None]:
        """Count one optimizer step. With `alone`, each collective runs on an idle device and is timed."""
        self.begin()
        self._alone = alone
        began = time.perf_counter()
        try:
            yield
            if alone:
                self.synchronize()
                self._step_s = time.perf_counter() - began
        finally:
            self.end()

    @property
    def can_be_timed(self) -> bool:
        """Whether the last step sent something, and every collective can be waited for at once."""
        sends = any(count.sent_bytes for count in self._counts.values())
        return sends and not any(op.name in self._counts for op in _OPS.values() if not op.waits)

    def describe(self) -> Communication:
        """Return the collectives of this rank's last step."""
        return Communication(ops=dict(self._counts), step_s=self._step_s)

    def _count(self, original: Callable[..., Any], op: _Op, /, *args: Any, **kwargs: Any) -> Any:
        """Call the method and count it; in a step that runs alone, time it as well."""
        if not self._counting:
            return original(*args, **kwargs)
        timed = self._alone and op.waits
        count = self._counts.get(op.name) or Collective(calls=0, bytes=0, sent_bytes=0, seconds=0.0 if timed else None)
        whole = args[op.position] if len(args) > op.position else kwargs[op.whole]
        tensors = whole if isinstance(whole, list | tuple) else [whole]
        size = sum(int(tensor.numel()) * int(tensor.element_size()) for tensor in tensors)
        groups = [value for value in (kwargs.get("group"), *args) if hasattr(value, "rank") and hasattr(value, "size")]
        ranks = int(groups[0].size()) if groups else self._world_size
        sent_bytes = count.sent_bytes + round(size * _SENT_SHARE[op.sends](ranks))
        count = replace(count, calls=count.calls + 1, bytes=count.bytes + size, sent_bytes=sent_bytes)
        self._counts[op.name] = count
        if not timed:
            return original(*args, **kwargs)
        self.synchronize()
        began = time.perf_counter()
        result = original(*args, **kwargs)
        for handle in result if isinstance(result, list) else [result]:
            if hasattr(handle, "wait"):
                handle.wait()  # the caller may wait once more, which returns at once
        self.synchronize()
        if count.seconds is not None:
            self._counts[op.name] = replace(count, seconds=count.seconds + time.perf_counter() - began)
        return result
