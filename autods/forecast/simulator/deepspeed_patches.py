"""Patches of DeepSpeed on the simulated GPU: compiled ops, swap files, large worlds."""

from __future__ import annotations

import builtins
import math
import os
import sys
import types
from typing import Any

import torch

from .ledger import Ledger
from .protocol import unsupported

_IN_PLACE = frozenset({
    "multi_tensor_adam", "multi_tensor_lion",
    *(f"{verb}_{name}" for name in ("adam", "adagrad", "lion") for verb in ("create", "destroy")),
    *(f"{name}_update" for name in ("adam", "adagrad", "lion")), "adam_rollback",
})  # fmt: skip
_LAMB_NORMS = 512  # elements each of the two norms' partial sums, csrc/lamb/fused_lamb_cuda.cpp


def install_kernels(ledger: Ledger) -> None:
    """Every op builder is compatible and loads a module of no-ops."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    class SwapFiles(_SwapFiles):
        books = ledger

    def load(self: Any, verbose: bool = True) -> Any:
        return _Ops(self.name, SwapFiles)

    OpBuilder.load = load
    OpBuilder.is_compatible = lambda self, verbose=False: True


class _Ops(types.ModuleType):
    """The functions of a compiled op, as far as their memory is known."""

    def __init__(self, name: str, handle: type) -> None:
        super().__init__(name)
        self.aio_handle = self.gds_handle = self.pin_handle = handle
        self.lamb = _lamb

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _IN_PLACE:
            return lambda *args, **kwargs: 0

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise unsupported(f"DeepSpeed's compiled function {self.__name__}.{name} is not simulated")

        return refuse


def _lamb(parameter: Any, *args: Any) -> Any:
    """FusedLamb's step on a tensor: it returns a coefficient, and sums up two norms by parts meanwhile."""
    sums = [torch.empty(_LAMB_NORMS, dtype=parameter.dtype, device=parameter.device) for _ in range(2)]
    coefficient = torch.empty(1, dtype=parameter.dtype, device=parameter.device)
    del sums
    return coefficient


class _SwapFiles:
    """The handle of async_io: reads and writes are done at once, and the files' sizes are booked."""

    books: Ledger

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._pending = 0

    def new_cpu_locked_tensor(self, count: int, like: Any) -> Any:
        """A pinned buffer."""
        tensor = torch.empty(count, dtype=like.dtype, pin_memory=not self.books.one_memory)
        self.books.lock(tensor)
        return tensor

    def free_cpu_locked_tensor(self, tensor: Any) -> bool:
        """The ledger sees it go."""
        return True

    def is_pinned(self, tensor: Any) -> bool:
        """As the ledger knows it."""
        return tensor.device.type == "cpu" and (self.books.one_memory or self.books.is_pinned(tensor))

    def async_pwrite(self, tensor: Any, path: str, offset: int = 0, *args: Any) -> int:
        """Book the file's size."""
        size = offset + tensor.numel() * tensor.element_size()
        self.books.nvme[path] = max(size, self.books.nvme.get(path, 0))
        self._pending += 1
        return 0

    def async_pread(self, *args: Any, **kwargs: Any) -> int:
        """Done."""
        self._pending += 1
        return 0

    def sync_pwrite(self, tensor: Any, path: str, offset: int = 0, *args: Any) -> int:
        """Book the file's size; nothing stays pending."""
        self.async_pwrite(tensor, path, offset)
        self._pending -= 1
        return 0

    def wait(self) -> int:
        """How many operations were pending."""
        count, self._pending = self._pending, 0
        return count

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: 0


_FROM = 16  # ranks


def install_large_worlds(world_size: int) -> None:
    """In this process, if the world is large."""
    if world_size < _FROM or os.environ.get("AUTODS_EVERY_RANK"):
        return
    from deepspeed.runtime.zero import partition_parameters, stage3

    if hasattr(stage3, "reduce_scatter_coalesced"):
        stage3.reduce_scatter_coalesced = _reduce_scatter_coalesced
    handle = getattr(partition_parameters, "AllGatherCoalescedHandle", None)
    if handle is not None:
        own = handle.wait
        handle.wait = lambda self, *args, **kwargs: _wait(self, own, *args, **kwargs)
        partition_parameters.range = _range


def _reduce_scatter_coalesced(tensors: list[Any], group: Any = None) -> list[Any]:
    """As deepspeed.runtime.comm.coalesced_collectives has it, for rank 0."""
    from deepspeed import comm

    world = comm.get_world_size(group)
    chunks = [math.ceil(tensor.numel() / world) for tensor in tensors]
    with torch.no_grad():
        missing = [chunk * world - tensor.numel() for chunk, tensor in zip(chunks, tensors, strict=True)]
        padding = [tensor.new_empty(count) for count, tensor in zip(missing, tensors, strict=True) if count]
        whole = len(tensors) == 1 and not padding
        flat = tensors[0].view(-1) if whole else tensors[0].new_empty(sum(chunks) * world)
        flat.div_(world)
        own = flat.narrow(0, 0, sum(chunks))
        starts = [sum(chunks[:index]) for index in builtins.range(len(chunks))]
        sizes = [min(chunk, tensor.numel()) for chunk, tensor in zip(chunks, tensors, strict=True)]
        return [own.narrow(0, start, size) for start, size in zip(starts, sizes, strict=True)]


def _wait(handle: Any, own: Any, handle_dependency: bool = True) -> None:
    """As AllGatherCoalescedHandle has it, each parameter one piece of the gathered buffer."""
    if handle.complete or handle.quantization:
        own(handle, handle_dependency)
        return
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    handle.allgather_handle.wait()
    for param in handle.params:
        gathered = handle.partitions[0].new_empty(param.ds_numel)
        param.data = gathered.view(param.ds_shape).to(param.ds_tensor.dtype)
        param.ds_status = ZeroParamStatus.AVAILABLE
    handle.complete = True


def _range(*args: int) -> Any:
    """`range` as that module sees it: the views of a gathered buffer are made for rank 0 only."""
    if sys._getframe(1).f_code.co_name in ("_all_gather_dtype",) and len(args) == 1:
        return builtins.range(min(args[0], 1))
    return builtins.range(*args)
