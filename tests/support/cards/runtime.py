"""The C half of torch.cuda for a process on a simulated card: `torch._C._cuda_*`, as far as torch calls it here."""

from __future__ import annotations

import ctypes
import os
import types
from typing import Any

import torch

from autods.forecast.predict.allocator import UNIT, ExpandableHeap, Heap
from tests.support.cards.machine import CONTEXT_BYTES, NCCL_BYTES, Machine

_BUILT_FOR = "12.8"
_LOST = (
    "CUDA error: CUDA-capable device(s) is/are busy or unavailable\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be"
    " incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
)


def make_heap(runtime: Runtime, kind: type[Heap]) -> Heap:
    """The caching allocator of one card: it reserves no more than its limit, and no more than the card has free."""

    class CardHeap(kind):  # type: ignore[misc, valid-type]
        def may_reserve(self, size: int) -> bool:
            return kind.may_reserve(self, size) and size * UNIT <= runtime.free_bytes()

        def release_all(self) -> None:
            kind.release_all(self)
            runtime.hold()

    return CardHeap()


class Runtime:
    """One process's CUDA. A rank uses one card, so the allocator is that of the current device."""

    def __init__(self, machine: Machine, library: ctypes.CDLL) -> None:
        self.machine, self.library = machine, library
        self.current = 0
        self.initialized_by: int | None = None  # a pid
        self.beside_bytes = 0  # on the card beside the allocator
        self.heap = make_heap(self, Heap)
        self.ooms = 0
        self.pinned_peak = lambda: 0  # `tensors` knows it

    def install(self) -> None:
        """Put this under torch.cuda; DeepSpeed is not imported yet."""
        functions: dict[str, Any] = {
            "init": self._initialize,
            "getDeviceCount": self._count_devices,
            "getDevice": lambda: self.current,
            "setDevice": self._set_device,
            "synchronize": self._synchronize,
            "getArchFlags": lambda: "sm_70 sm_80 sm_90",
            "getCurrentRawStream": lambda index: 0,
            "memoryStats": self._stats,
            "hostMemoryStats": lambda: {"allocated_bytes": {"peak": self.pinned_peak()}},
            "resetPeakMemoryStats": self._reset_peaks,
            "setMemoryFraction": self._set_fraction,
            "emptyCache": lambda: self.heap.release_all(),
        }
        for name, function in functions.items():
            setattr(torch._C, f"_cuda_{name}", function)
        torch._C._accelerator_setAllocatorSettings = self._set_allocator
        cuda: Any = torch.cuda
        cuda._is_compiled = lambda: True
        cuda._is_in_bad_fork = lambda: self.initialized_by not in (None, os.getpid())
        cuda._cudart = types.SimpleNamespace(cudaMemGetInfo=self._free_and_total)
        cuda._get_device_properties = self._properties
        cuda._exchange_device = cuda._maybe_exchange_device = lambda index: self.current
        cuda.is_current_stream_capturing = lambda: False
        torch.version.cuda = torch.version.cuda or _BUILT_FOR

    @property
    def visible(self) -> list[int]:
        """The machine's cards that CUDA shows this process."""
        return self.machine.visible(os.environ.get("CUDA_VISIBLE_DEVICES"))

    def card(self, index: int | None = None) -> Any:
        """A visible card, the current one without an index. Raises torch's error where it is lost."""
        card = self.machine.state.card[self.visible[self.current if index is None else index]]
        if card.lost:
            raise torch.AcceleratorError(_LOST)
        return card

    def free_bytes(self) -> int:
        """Bytes of the current card that no process holds."""
        return max(0, self.card().total_bytes - self.machine.used_bytes(self.visible[self.current]))

    def hold(self) -> None:
        """Enter what this process holds on its card."""
        self.machine.hold(os.getpid(), self.visible[self.current], self.beside_bytes + self.heap.reserved * UNIT)

    def make_context(self) -> None:
        """Use the card, which takes memory."""
        if not self.beside_bytes:
            self.beside_bytes = CONTEXT_BYTES
            self.hold()

    def make_communicator(self) -> None:
        """Start NCCL, which takes memory."""
        if self.beside_bytes <= CONTEXT_BYTES:
            self.beside_bytes = CONTEXT_BYTES + NCCL_BYTES
            self.hold()

    def allocate(self, size: int) -> None:
        """Take a block from the allocator. Raises torch's error where there is no memory for it."""
        self.make_context()
        reserved, failed = self.heap.reserved, self.heap.run((size,))
        if failed is not None:
            self.ooms += 1
            raise torch.OutOfMemoryError(self._describe_shortage(size))
        if self.heap.reserved != reserved:
            self.hold()

    def free(self, block: int) -> None:
        """Give the block with that number back to the allocator."""
        self.heap.run((~block,))

    def _initialize(self) -> None:
        ctypes.CDLL("libcuda.so.1").cuInit(0)
        self.initialized_by = os.getpid()
        generators = [torch.Generator() for _ in self.visible]
        torch.cuda.default_generators = tuple(generators)  # type: ignore[attr-defined]

    def _count_devices(self) -> int:
        ctypes.CDLL("libcuda.so.1").cuInit(0)  # as cudaGetDeviceCount does
        self.initialized_by = self.initialized_by or os.getpid()
        return len(self.visible)

    def _set_device(self, index: int) -> None:
        if not 0 <= index < len(self.visible):
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")
        self.current = index
        self.library.autods_use_device(index, len(self.visible))
        self.card()
        self.make_context()

    def _synchronize(self) -> None:
        self.card()

    def _set_allocator(self, settings: str) -> None:
        assert not self.heap.reserved, "torch's segments are of one kind from the first on"
        if "expandable_segments:True" in settings:
            self.heap = make_heap(self, ExpandableHeap)

    def _set_fraction(self, fraction: float, index: int) -> None:
        self.heap.limit_bytes = int(fraction * self.card(index).total_bytes)

    def _free_and_total(self, index: int) -> tuple[int, int]:
        self.make_context()
        return self.free_bytes(), int(self.card(index).total_bytes)

    def _properties(self, index: int) -> types.SimpleNamespace:
        card = self.card(index)
        return types.SimpleNamespace(
            name=card.name.decode(), total_memory=int(card.total_bytes), major=card.major, minor=card.minor,
            multi_processor_count=132, warp_size=32,
        )  # fmt: skip

    def _stats(self, index: int) -> dict[str, Any]:
        heap = self.heap
        allocated = {"all": {"current": heap.allocated * UNIT, "peak": heap.peak_allocated * UNIT}}
        return {
            "allocated_bytes": allocated,
            "active_bytes": allocated,
            "reserved_bytes": {"all": {"current": heap.reserved * UNIT, "peak": heap.peak_reserved * UNIT}},
            "num_alloc_retries": heap.retries,
            "num_ooms": self.ooms,
        }

    def _reset_peaks(self, index: int) -> None:
        self.heap.peak_allocated, self.heap.peak_reserved = self.heap.allocated, self.heap.reserved

    def _describe_shortage(self, size: int) -> str:
        """As c10/cuda/CUDACachingAllocator.cpp words it."""
        heap = self.heap
        others = [
            f"Process {pid} has {format_size(held)} memory in use. "
            for pid, held in self.machine.holders(self.visible[self.current])
            if pid != os.getpid()
        ]
        allowed = "" if heap.limit_bytes is None else f"{format_size(heap.limit_bytes)} allowed; "
        return (
            f"CUDA out of memory. Tried to allocate {format_size(size)}. GPU {self.current} has a total capacity of "
            f"{format_size(self.card().total_bytes)} of which {format_size(self.free_bytes())} is free. "
            f"{''.join(others)}Including non-PyTorch memory, this process has "
            f"{format_size(self.beside_bytes + heap.reserved * UNIT)} memory in use. "
            f"{allowed}Of the allocated memory {format_size(heap.allocated * UNIT)} is allocated by PyTorch, and "
            f"{format_size((heap.reserved - heap.allocated) * UNIT)} is reserved by PyTorch but unallocated. If "
            "reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid "
            "fragmentation.  See documentation for Memory Management  "
            "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
        )


def format_size(size: int) -> str:
    """As torch's messages have it: '1.95 GiB'."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"
