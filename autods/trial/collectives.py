"""What DeepSpeed's collectives move in an optimizer step: calls and bytes of each kind, seconds where they are wanted.

DeepSpeed's own comms_logger (0.19.8) synchronises the device after every collective, so that nothing overlaps while it
looks. Its timer is never reset: the 120 all-reduces of a run of 13 s were told as 207 s. It takes a gather's own part
for its size, and does not see coalesced ones. So the methods of DeepSpeed's backend are counted here, which costs some
microseconds a call; seconds are taken in a step of their own, in which no throughput is measured.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _Op:
    """A method of DeepSpeed's backend. whole: name and place of the argument that is as large as all ranks' parts.

    sends: world size → the share of those bytes that a rank sends, by the ring algorithm (as in nccl-tests).
    waits: it can be waited for at once without a peer that does something else first.
    """

    name: str
    whole: tuple[str, int]
    sends: Callable[[int], float]
    waits: bool = True


def _reduced(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def _gathered(ranks: int) -> float:
    return (ranks - 1) / ranks


def _passed_on(ranks: int) -> float:
    return float(ranks > 1)


def _received(ranks: int) -> float:
    return 0.0


_OPS: Mapping[str, _Op] = {
    "all_reduce": _Op(name="all_reduce", whole=("tensor", 0), sends=_reduced),
    "all_reduce_coalesced": _Op(name="all_reduce", whole=("tensors", 0), sends=_reduced),
    "inference_all_reduce": _Op(name="all_reduce", whole=("tensor", 0), sends=_reduced),
    "reduce": _Op(name="reduce", whole=("tensor", 0), sends=_passed_on),
    "reduce_scatter": _Op(name="reduce_scatter", whole=("input_list", 1), sends=_gathered),
    "reduce_scatter_tensor": _Op(name="reduce_scatter", whole=("input_tensor", 1), sends=_gathered),
    "all_gather": _Op(name="all_gather", whole=("tensor_list", 0), sends=_gathered),
    "all_gather_into_tensor": _Op(name="all_gather", whole=("output_tensor", 0), sends=_gathered),
    "all_gather_coalesced": _Op(name="all_gather", whole=("output_tensors", 0), sends=_gathered),
    "all_to_all": _Op(name="all_to_all", whole=("input_tensor_list", 1), sends=_gathered),
    "all_to_all_single": _Op(name="all_to_all", whole=("input", 1), sends=_gathered),
    "broadcast": _Op(name="broadcast", whole=("tensor", 0), sends=_passed_on),
    "gather": _Op(name="gather", whole=("tensor", 0), sends=_passed_on),
    "scatter": _Op(name="scatter", whole=("tensor", 0), sends=_passed_on),
    "send": _Op(name="send", whole=("tensor", 0), sends=_passed_on, waits=False),
    "isend": _Op(name="send", whole=("tensor", 0), sends=_passed_on, waits=False),
    "recv": _Op(name="recv", whole=("tensor", 0), sends=_received, waits=False),
    "irecv": _Op(name="recv", whole=("tensor", 0), sends=_received, waits=False),
}


@dataclass(slots=True)
class _Count:
    calls: int = 0
    bytes: int = 0
    sent_bytes: float = 0.0
    seconds: float | None = 0.0


@dataclass(slots=True)
class Traffic:
    """Counts within `step` alone, each step anew; `describe` is of the last one."""

    synchronize: Callable[[], None]
    _counts: dict[str, _Count] = field(default_factory=dict)
    _counting: bool = False
    _alone: bool = False
    _step_s: float | None = None
    _world_size: int = 1

    def listen(self, backend: Any) -> None:
        """From here on, once the ranks have joined: the collectives of DeepSpeed's backend pass through here."""
        self._world_size = int(backend.get_world_size())
        for method, op in _OPS.items():
            own = getattr(backend, method, None)
            if own is not None:
                setattr(backend, method, self._counted(own, op))

    def begin(self) -> None:
        """A step begins, if none has."""
        if not self._counting:
            self._counts, self._step_s, self._counting = {}, None, True

    def end(self) -> None:
        """The step has ended."""
        self._counting = self._alone = False

    @contextmanager
    def step(self, *, alone: bool = False) -> Iterator[None]:
        """One optimizer step. alone: each collective begins when the device is idle, and is waited for and timed."""
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
        """Whether the last step had something to send, and nothing that waits for what a peer does first."""
        sent = sum(one.sent_bytes for one in self._counts.values())
        return sent > 0 and not any(op.name in self._counts for op in _OPS.values() if not op.waits)

    def describe(self) -> dict[str, Any]:
        """`Communication` of this rank as a dict."""
        timed = self._step_s is not None
        ops = {
            name: {
                "calls": one.calls,
                "bytes": one.bytes,
                "sent_bytes": round(one.sent_bytes),
                "seconds": one.seconds if timed else None,
            }
            for name, one in self._counts.items()
        }
        return {"ops": ops, "step_s": self._step_s}

    def _counted(self, own: Callable[..., Any], op: _Op) -> Callable[..., Any]:
        name, place = op.whole

        @functools.wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._counting:
                return own(*args, **kwargs)
            count = self._counts.setdefault(op.name, _Count())
            size = _bytes(args[place] if len(args) > place else kwargs[name])
            count.calls += 1
            count.bytes += size
            count.sent_bytes += size * op.sends(self._ranks_of(args, kwargs))
            if not self._alone:
                return own(*args, **kwargs)
            if not op.waits:
                count.seconds = None
                return own(*args, **kwargs)
            return self._timed(count, lambda: own(*args, **kwargs))

        return call

    def _timed(self, count: _Count, work: Callable[[], Any]) -> Any:
        self.synchronize()
        began = time.perf_counter()
        handle = work()
        for one in handle if isinstance(handle, list) else [handle]:
            if hasattr(one, "wait"):
                one.wait()  # whoever asked for it waits again, for nothing
        self.synchronize()
        if count.seconds is not None:
            count.seconds += time.perf_counter() - began
        return handle

    def _ranks_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Of the process group that a call names, by name or by place; of all ranks where it names none."""
        group = kwargs.get("group") or next(
            (one for one in args if hasattr(one, "rank") and hasattr(one, "size")), None
        )
        return self._world_size if group is None else int(group.size())


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, list | tuple):
        return sum(_bytes(tensor) for tensor in tensors)
    return int(tensors.numel()) * int(tensors.element_size())


def backend() -> Any:
    """DeepSpeed's, once the ranks have joined."""
    from deepspeed.comm import comm

    return comm.cdb
