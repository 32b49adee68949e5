"""DeepSpeed's compiled ops without their kernels. Swap files are counted, never written.

The optimizers' kernels work in place: they are no-ops. A function that is not listed here might allocate or return
something; nobody simulates it, and asking for it says so.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from .ledger import Ledger
from .refusals import unsupported

_IN_PLACE = frozenset({
    "multi_tensor_adam", "multi_tensor_lion",
    *(f"{verb}_{name}" for name in ("adam", "adagrad", "lion") for verb in ("create", "destroy")),
    *(f"{name}_update" for name in ("adam", "adagrad", "lion")), "adam_rollback",
})  # fmt: skip
_LAMB_NORMS = 512  # elements each of the two norms' partial sums, csrc/lamb/fused_lamb_cuda.cpp


def install(ledger: Ledger) -> None:
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
