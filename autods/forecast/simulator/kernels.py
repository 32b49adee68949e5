"""DeepSpeed's compiled ops as no-ops: none of them allocates on the device. Swap files are counted, never written."""

from __future__ import annotations

import types
from typing import Any

import torch

from .ledger import Ledger


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
    """Any function of a compiled op, doing nothing."""

    def __init__(self, name: str, handle: type) -> None:
        super().__init__(name)
        self.aio_handle = self.gds_handle = handle

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: 0


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
