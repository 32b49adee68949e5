"""Count the calls and bytes of DeepSpeed's collectives in an optimizer step, and time them in a separate step.

DeepSpeed's comms_logger (0.19.8) does not serve here. It synchronises the device after every collective, so that
nothing overlaps. Its timer is never reset (207 s for a run of 13 s). It takes a rank's part of a gather for the
whole, and misses coalesced collectives. Counting in the methods of DeepSpeed's backend costs some microseconds a call.
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
    """A method of DeepSpeed's backend.

    `whole` is the name and position of the argument that is as large as all ranks' parts together. `sends` maps the
    number of ranks to the share of these bytes that a rank sends by the ring algorithm, as in nccl-tests. `waits` is
    whether a rank can wait for it at once without a deadlock.
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
    """Counts the collectives of each optimizer step; `describe` returns those of the last one."""

    synchronize: Callable[[], None]
    _counts: dict[str, _Count] = field(default_factory=dict)
    _counting: bool = False
    _alone: bool = False
    _step_s: float | None = None
    _world_size: int = 1

    def listen(self, backend: Any) -> None:
        """Count the collectives of this backend from here on; the ranks must have joined."""
        self._world_size = int(backend.get_world_size())
        for method, op in _OPS.items():
            original = getattr(backend, method, None)
            if original is not None:
                setattr(backend, method, self._count(original, op))

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
        sent = sum(count.sent_bytes for count in self._counts.values())
        return sent > 0 and not any(op.name in self._counts for op in _OPS.values() if not op.waits)

    def describe(self) -> dict[str, Any]:
        """Return `types.Communication` of this rank's last step as a dict."""
        timed = self._step_s is not None
        ops = {
            name: {
                "calls": count.calls,
                "bytes": count.bytes,
                "sent_bytes": round(count.sent_bytes),
                "seconds": count.seconds if timed else None,
            }
            for name, count in self._counts.items()
        }
        return {"ops": ops, "step_s": self._step_s}

    def _count(self, original: Callable[..., Any], op: _Op) -> Callable[..., Any]:
        """Return the method with its calls counted, and timed in a step that runs alone."""
        name, place = op.whole

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._counting:
                return original(*args, **kwargs)
            count = self._counts.setdefault(op.name, _Count())
            size = _count_bytes(args[place] if len(args) > place else kwargs[name])
            count.calls += 1
            count.bytes += size
            count.sent_bytes += size * op.sends(self._group_size(args, kwargs))
            if not self._alone:
                return original(*args, **kwargs)
            if not op.waits:
                count.seconds = None
                return original(*args, **kwargs)
            return self._time(count, lambda: original(*args, **kwargs))

        return call

    def _time(self, count: _Count, work: Callable[[], Any]) -> Any:
        self.synchronize()
        began = time.perf_counter()
        result = work()
        for handle in result if isinstance(result, list) else [result]:
            if hasattr(handle, "wait"):
                handle.wait()  # the caller may wait once more, which returns at once
        self.synchronize()
        if count.seconds is not None:
            count.seconds += time.perf_counter() - began
        return result

    def _group_size(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Return the number of ranks in the process group of a call; all ranks if it names none."""
        group = kwargs.get("group") or next(
            (argument for argument in args if hasattr(argument, "rank") and hasattr(argument, "size")), None
        )
        return self._world_size if group is None else int(group.size())


def _count_bytes(tensors: Any) -> int:
    if isinstance(tensors, list | tuple):
        return sum(_count_bytes(tensor) for tensor in tensors)
    return int(tensors.numel()) * int(tensors.element_size())


def backend() -> Any:
    """Return DeepSpeed's communication backend; the ranks must have joined."""
    from deepspeed.comm import comm

    return comm.cdb
