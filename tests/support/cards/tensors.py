"""Simulated tensors of a rank: the forecast's, but their memory comes from the card, and ranks wait for each other.

The only values are those of one-element tensors that Python made and that ranks agree on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from autods.forecast.simulate import deepspeed_patches, fake_gpu, torch_patches, unknown_values
from autods.forecast.simulate.dispatch import Recorder
from autods.forecast.simulate.ledger import DEVICE, PINNED, Ledger
from tests.support.cards.runtime import Runtime

_aten = torch.ops.aten
_ONE_WAY = ("send", "recv_", "recv_any_source_")
_modes: list[Any] = []


def install(runtime: Runtime) -> None:
    """Patch torch and DeepSpeed in this process, from which ranks are forked or which is one."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    fake.cache_enabled = False
    ledger = CardLedger(runtime)
    fake_gpu.install_streams(ledger.work)
    torch.cuda.nccl.version = lambda: (2, 27, 0)
    torch_patches.install(ledger)
    unknown_values.install(lambda sentence: None)
    deepspeed_patches.install(ledger)
    _replace_nccl(runtime)
    _save_without_values()
    _modes[:] = fake, CardRecorder(ledger, fake)


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Tensors that are made inside the block are simulated."""
    with _modes[0], _modes[1]:
        yield


class CardLedger(Ledger):
    """Takes the memory of tensors on the device from the card's allocator."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(one_memory=False)
        self.runtime = runtime
        runtime.pinned_peak = lambda: self.peak_bytes(PINNED)

    def peak_bytes(self, tier: int) -> int:
        """The most bytes of a tier so far."""
        return self.highest[tier]

    def _add(self, key: int, size: int, tier: int, watch: Any) -> None:
        if tier == DEVICE:
            self.runtime.allocate(size)
        super()._add(key, size, tier, watch)

    def _remove(self, key: int) -> None:
        _, tier, block, _ = self._live[key]
        super()._remove(key)
        if tier == DEVICE:
            self.runtime.free(block)


class CardRecorder(Recorder):
    """Runs operators as forecasts do; collectives wait for all ranks, and carry the values that there are."""

    ledger: CardLedger

    def __init__(self, ledger: CardLedger, mode: Any) -> None:
        super().__init__(ledger, mode)
        self._handlers[_aten._to_copy.default] = self._to_copy

    def _to_copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        value = args[0].constant if args[0].constant is not None else _value(args[0])
        if value is None:
            return self._cache.call(func, args, kwargs)
        out = self._run(func, args, kwargs)
        with _disable_current_modes():
            out.autods_value = value.to(out.dtype, copy=True)
        return out

    def _scalar(self, func: Any, args: Any, kwargs: Any) -> Any:
        value = _value(args[0])
        if value is None:
            return super()._scalar(func, args, kwargs)
        with _disable_current_modes():
            return value.item()

    def _run_collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.ledger.runtime.card()
        name = func._schema.name.partition("::")[2]
        if name not in _ONE_WAY and torch.distributed.get_world_size() > 1:
            with _disable_current_modes():
                self._wait_for_ranks(name, func, args)
        return super()._run_collective(func, args, kwargs)

    def _wait_for_ranks(self, name: str, func: Any, args: Any) -> None:
        boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()))
        group = torch._C._distributed_c10d.ProcessGroup.unbox(boxed)
        values = [_value(tensor) for tensor in tree_leaves(args[0])]
        if name == "broadcast_" and None not in values:
            group.broadcast(values, _broadcast_options(args[2])).wait()
        elif name == "allreduce_" and None not in values:
            group.allreduce(values).wait()
        else:
            group.barrier().wait()


def _broadcast_options(root: int) -> Any:
    options = torch.distributed.BroadcastOptions()
    options.rootRank = root
    return options


def _value(tensor: Any) -> Any:
    return getattr(tensor, "autods_value", None)


def _replace_nccl(runtime: Runtime) -> None:
    """Let gloo stand in for NCCL, whose communicator takes memory: at once where it is bound to a device."""
    distributed: Any = torch.distributed
    start, is_available = distributed.init_process_group, distributed.is_nccl_available

    def init_process_group(backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        if backend == "nccl" and not is_available():
            if int(kwargs.get("world_size", -1)) != 1 and device_id is not None:
                runtime.make_communicator()
            backend = "cpu:gloo,cuda:gloo"
        with _disable_current_modes():
            start(backend, *args, **kwargs)

    distributed.init_process_group = distributed.distributed_c10d.init_process_group = init_process_group


def _save_without_values() -> None:
    """Let `torch.save` write files of the right size, and `torch.load` make tensors of them."""
    save, load = torch.save, torch.load

    def save_without_values(*args: Any, **kwargs: Any) -> None:
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            save(*args, **kwargs)

    def load_without_values(path: Any, map_location: Any = None, **kwargs: Any) -> Any:
        return load(path, map_location="cpu" if callable(map_location) else map_location, **kwargs)

    torch.save, torch.load = save_without_values, load_without_values
