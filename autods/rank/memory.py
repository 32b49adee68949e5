"""Measure and limit the memory of a rank: a meter for each device."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import os
import pkgutil
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..devices import find_device
from ..devices.base import EXPANDABLE
from ..devices.cuda import CUDA, read_process_bytes, read_used_bytes
from ..system import processes
from ..units import format_bytes
from .patching import declare

_LIBC = ctypes.CDLL(None)
_PAGE = os.sysconf("SC_PAGE_SIZE")
FEWEST_GROWTHS = 3  # of memory from step to step, for a verdict
_LEAST_GROWTH = 2**20  # bytes a step: the heap of a CPU rank grows in pieces, and a list of losses is no leak
_MAX_MMAP = re.compile(rb"max mmap bytes\s*=\s*(\d+)")
# DeepSpeed's see_memory_usage resets peaks, and so do scripts that log them.
_RESETS = tuple(
    declare(symbol, "the meter keeps its measurements when torch's counters are reset")
    for symbol in (
        "torch.cuda.memory.reset_peak_memory_stats",
        "torch.cuda.memory.reset_accumulated_memory_stats",
        "torch.cuda.memory.reset_peak_host_memory_stats",
        "torch.accelerator.memory.reset_peak_memory_stats",
        "torch.accelerator.memory.reset_accumulated_memory_stats",
    )
)


@dataclass(frozen=True, slots=True)
class Baseline:
    """Bytes that a process held before its trial, which a meter does not count."""

    data: int
    anon: int
    mapped: tuple[int, int]

    @classmethod
    def read(cls) -> Baseline:
        """Read what this process holds now, without the free bytes of its heap: the trial fills those first."""
        now, heap = status_bytes("VmData", "RssAnon"), _read_malloc()
        return cls(now["VmData"] - (heap.fordblks if heap else 0), now["RssAnon"], read_mapped_bytes())


class Meter:
    """Limits and measures the memory of one rank. Its trial calls `sample` at every change of phase."""

    def start(self, baseline: Baseline | None = None) -> None:
        """Set the limit and begin to count, from the baseline or from what this process holds now.

        A rank that inherits the built model gets the baseline before that build. It then counts the model's pages as
        its own, shared or not, as if it had built the model.
        """

    def lift(self) -> None:
        """Remove the limit, if it could keep a rank that ran out from writing its result."""

    def run_without_limit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that must not run out of memory half-way. What it holds counts: the rank may run out next."""
        return function(*args, **kwargs)

    def sample(self) -> None:
        """Look at the memory once, if the device does not record its peak itself; this must be cheap."""

    def held_bytes(self) -> int:
        """Return the device memory that is in use now, without what the allocator keeps for later."""
        return 0

    def peaks(self) -> dict[str, int | None]:
        """Return peak bytes by tier, and further figures of the device."""
        raise NotImplementedError

    def device_peak(self) -> int | None:
        """Return the device's peak bytes so far, as cheaply as `sample`; a CPU rank knows the phases' begins alone."""
        return None

    def free_bytes(self) -> int | None:
        """Return how much of the limit is left now."""
        raise NotImplementedError

    def settle(self) -> None:
        """A part that happens once is over: the rendezvous, building, initialising, or the first optimizer step."""

    def leave_device(self) -> dict[str, int]:
        """From here on the host works on a checkpoint. Return the device's peak until now, if it counts alone."""
        return {}

    def return_to_device(self) -> None:
        """The checkpoint is done, and training goes on within the limit."""

    def allocator(self) -> dict[str, int]:
        """Return `idle_bytes`, reserved on the device without a tensor, and `alloc_retries` since the last `settle`."""
        return {}

    def synchronize(self) -> None:
        """Wait until the device is done, so that clocks can be read. CPU operators are done when they return."""

    def mark(self) -> Any:
        """Return a mark of this moment of the device's work, for `seconds_between`."""
        return time.perf_counter()

    def seconds_between(self, begin: Any, end: Any) -> float | None:
        """Return the seconds between two marks, without waiting; None where the device is not there yet."""
        return float(end - begin)


@dataclass(slots=True)
class CpuMeter(Meter):
    """The meter of a CPU rank: `limit_bytes` becomes a hard limit of the process's private memory."""

    limit_bytes: int | None
    local_rank: int = 0
    _hard_limit: int = resource.RLIM_INFINITY  # only root may raise it
    _data_at_start: int = 0
    _anon_at_start: int = 0
    _peak_data: int = 0
    _peak_private: int = 0
    _mapped_at_start: tuple[int, int] = (0, 0)

    def start(self, baseline: Baseline | None = None) -> None:
        """Reset the kernel's high-water mark and set the limit. Raises OSError if the shell's own limit is lower."""
        with contextlib.suppress(OSError):  # an older kernel: the mark then includes the zygote's peak
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM := VmRSS
        before = baseline or Baseline.read()
        self._data_at_start, self._anon_at_start, self._mapped_at_start = before.data, before.anon, before.mapped
        if self.limit_bytes is not None:
            self._hard_limit = hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            budget = before.data + self.limit_bytes
            if hard != resource.RLIM_INFINITY and budget > hard:
                raise OSError(f"ulimit -Hd lets a process hold {format_bytes(hard)}: {format_bytes(budget)} are needed")
            self._set_limit(self.limit_bytes)

    def lift(self) -> None:
        if self.limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (self._hard_limit, self._hard_limit))

    def run_without_limit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        limits = resource.getrlimit(resource.RLIMIT_DATA)
        self.lift()
        try:
            result = function(*args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, limits)
        # What was freed before may serve a small model: the kernel alone would not refuse it.
        if self.limit_bytes is not None and (data := self._count_data()) > self.limit_bytes:
            raise MemoryError(f"{format_bytes(data)} are held, and the limit is {format_bytes(self.limit_bytes)}")
        return result

    def sample(self) -> None:
        data, private = _read_statm()
        self._peak_data = max(self._peak_data, data - self._data_at_start)
        self._peak_private = max(self._peak_private, private)

    def device_peak(self) -> int:
        return self._peak_data

    def held_bytes(self) -> int:
        """What malloc has handed out, as torch's allocators count tensors.

        The process's data grow by a free part of the heap, or by an arena of Python's objects, of 1 MiB each, too.
        """
        heap = _read_malloc()
        return self._count_data() if heap is None else heap.uordblks + heap.hblkhd

    def _count_data(self) -> int:
        return _read_statm()[0] - self._data_at_start

    def peaks(self) -> dict[str, int | None]:
        self.sample()
        now = status_bytes("VmHWM", "RssFile", "RssShmem", "VmData")
        touched = now["VmHWM"] - now["RssFile"] - now["RssShmem"] - self._anon_at_start
        peak = max(self._peak_data, touched)
        (mapped_before, most_before), (mapped, most) = self._mapped_at_start, read_mapped_bytes()
        if most > most_before:  # else the zygote once held more than this trial: the other two marks must do
            # Malloc's own high-water mark, and the growth of other private memory (the heap, Python's arenas).
            grown = now["VmData"] - self._data_at_start - (mapped - mapped_before)
            peak = max(peak, most - mapped_before + grown)
        host_bytes = max(0, self._peak_private - self._anon_at_start)
        return {"device": peak, "host": host_bytes, "host_offset": -self._anon_at_start, "pinned": 0}

    def free_bytes(self) -> int | None:
        if self.limit_bytes is None:
            return None
        now = status_bytes("VmData")["VmData"] - self._data_at_start
        # Before an exception is caught, the objects under construction are freed: only the high-water mark has them.
        return max(0, self.limit_bytes - max(now, self.peaks()["device"] or 0))

    def leave_device(self) -> dict[str, int]:
        """Lift the limit: a checkpoint passes through host memory, which is no part of a device's budget."""
        peak = self.peaks()["device"] or 0
        self.lift()
        return {"device": peak}

    def return_to_device(self) -> None:
        """Give the memory of the checkpoint back, and set the limit again."""
        if self.limit_bytes is not None:
            gc.collect()
            _LIBC.malloc_trim(0)
            self._set_limit(self.limit_bytes)

    def _set_limit(self, limit_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (self._data_at_start + limit_bytes, self._hard_limit))


@dataclass(slots=True)
class CudaMeter(Meter):
    """The meter of a CUDA rank: `limit_bytes` emulates a smaller card.

    A card holds what torch's allocator reserves, and beside it the CUDA context, NCCL and the code of kernels. These
    are the bytes that NVML counts for this process, less the reserved ones. Where NVML does not know the process, they
    are what the whole card gained since before the rank began, for a rank has its card to itself. They only grow, so
    they are read when that costs no step time. The allocator may reserve what they leave of the limit.
    """

    limit_bytes: int | None
    local_rank: int
    cuda: Any = field(default_factory=lambda: importlib.import_module("torch.cuda"))
    nvml: Any = field(default_factory=lambda: importlib.import_module("pynvml"))
    accelerator: Any = field(default_factory=lambda: importlib.import_module("deepspeed.accelerator").get_accelerator())
    _total_bytes: int = 0
    _used_before: int = 0
    _beside_bytes: int = 0
    _private_at_start: int = 0
    _peaks: dict[str, int] = field(default_factory=dict)  # of the allocators and of private memory
    _forgotten_retries: int = 0  # by a reset of torch's counter
    _retries_before: int = 0

    def start(self, baseline: Baseline | None = None) -> None:
        """Take the card. DeepSpeed sees the emulated size: it flattens on the host where the card is too full."""
        self._grow_segments()
        # Before this rank's context is made, on the card and on the host:
        self._used_before = self._read_card(read_used_bytes) or 0
        self._private_at_start = read_private_bytes() if baseline is None else baseline.anon
        with contextlib.suppress(self.nvml.NVMLError):
            self.nvml.nvmlInit()  # DeepSpeed asks it for the card's free bytes, and expects it open since the import
        self.cuda.set_device(self.local_rank)
        self.cuda.mem_get_info(self.local_rank)  # makes the context
        self._total_bytes = int(self.cuda.get_device_properties(self.local_rank).total_memory)
        if self.limit_bytes is not None and self.limit_bytes < self._total_bytes:
            self.accelerator.total_memory = lambda device_index=None: self.limit_bytes
            self.accelerator.available_memory = lambda device_index=None: self.free_bytes()
        for patch in _RESETS:
            patch.wrap(self._reset_counters, everywhere=True)
        self.settle()

    def _grow_segments(self) -> None:
        """Apply the allocator's settings where segments grow: torch may have read the variable before the fork."""
        variable = CUDA.find_allocator_variable(os.environ)
        if variable is None or EXPANDABLE not in os.environ[variable]:
            return
        apply = getattr(importlib.import_module("torch")._C, "_accelerator_setAllocatorSettings", None)
        (apply or self.cuda.memory._set_allocator_settings)(os.environ[variable])  # torch 2.9 has the first

    def sample(self) -> None:
        self._raise_peak("private", read_private_bytes())

    def settle(self) -> None:
        """Measure the bytes beside the allocator, limit it to the others, and count its retries from here on."""
        self._measure()
        if self.limit_bytes is not None and self.limit_bytes < self._total_bytes:
            allowed_bytes = max(0, self.limit_bytes - self._beside_bytes)
            self.cuda.set_per_process_memory_fraction(allowed_bytes / self._total_bytes, self.local_rank)
            if self.cuda.memory_reserved(self.local_rank) > allowed_bytes:
                self.cuda.empty_cache()  # else the next steps would do it, as a retry
        self._retries_before = self._count_retries()

    def peaks(self) -> dict[str, int | None]:
        """Return `device`, at most held on the card, and `device_in_use`, the same without the allocator's cache.

        `device_beside` is the part of both that is not the allocator's. `host` is `host_offset` more than the private
        memory at its peak: page-locked pages of the driver are not private memory.
        """
        self._measure()
        peaks = self._peaks
        pinned = peaks.get("pinned")
        # Registered pages stay private memory. Others belong to the driver.
        settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        registered = "pinned_use_cuda_host_register:true" in settings.replace(" ", "").lower()
        host_offset = (0 if registered else pinned or 0) - self._private_at_start
        return {
            "device": peaks["reserved"] + self._beside_bytes,
            "device_in_use": peaks["active"] + self._beside_bytes,
            "device_beside": self._beside_bytes,
            "device_allocated": peaks["allocated"],
            "host": max(0, peaks["private"] + host_offset),
            "host_offset": host_offset,
            "pinned": None if pinned is None else pinned + peaks["locked"],
            **self.allocator(),
        }

    def device_peak(self) -> int:
        self._read_counters()
        return self._peaks["reserved"] + self._beside_bytes

    def held_bytes(self) -> int:
        return int(self.cuda.memory_allocated(self.local_rank))

    def allocator(self) -> dict[str, int]:
        stats = self.cuda.memory_stats(self.local_rank)
        idle = stats.get("reserved_bytes.all.current", 0) - stats.get("allocated_bytes.all.current", 0)
        return {"idle_bytes": int(idle), "alloc_retries": self._count_retries() - self._retries_before}

    def free_bytes(self) -> int | None:
        free, _ = self.cuda.mem_get_info(self.local_rank)
        if self.limit_bytes is None:
            return int(free)
        held = self._beside_bytes + int(self.cuda.memory_reserved(self.local_rank))
        return min(int(free), max(0, self.limit_bytes - held))

    def synchronize(self) -> None:
        self.cuda.synchronize(self.local_rank)

    def mark(self) -> Any:
        """An event in the stream that computes: the host only launches. So torch's DDP times its forwards, too.

        (`CudaTimer` of torch/csrc/distributed/c10d/reducer_cuda.cpp.)
        """
        event = self.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, begin: Any, end: Any) -> float | None:
        is_done = begin.query() and end.query()  # a script may do parts of a step in other streams
        return float(begin.elapsed_time(end)) / 1000 if is_done else None

    def _measure(self) -> None:
        """Read what only grows, and what torch has counted."""
        reserved = int(self.cuda.memory_reserved(self.local_rank))
        self._beside_bytes = max(self._count_card_bytes(reserved) - reserved, self._beside_bytes)
        self._raise_peak("locked", status_bytes("VmLck").get("VmLck", 0))  # by DeepSpeed's async_io
        self.sample()
        self._read_counters()

    def _read_counters(self) -> None:
        stats = self.cuda.memory_stats(self.local_rank)
        for name in ("allocated", "active", "reserved"):  # active: some freed blocks are still used by a stream
            self._raise_peak(name, int(stats.get(f"{name}_bytes.all.peak", 0)))
        # The host allocator's own bytes, in use or cached; older releases of torch call them reserved.
        host: Any = getattr(self.cuda, "host_memory_stats", dict)()
        pinned = host.get("reserved_bytes.peak", host.get("allocated_bytes.peak"))
        if pinned is not None:
            self._raise_peak("pinned", int(pinned))

    def _raise_peak(self, name: str, size: int) -> None:
        self._peaks[name] = max(size, self._peaks.get(name, 0))

    def _count_retries(self) -> int:
        """Return how often the allocator found nothing free. It fails without a retry while a graph is captured."""
        stats = self.cuda.memory_stats(self.local_rank)
        return self._forgotten_retries + max(int(stats.get(f"num_{name}", 0)) for name in ("alloc_retries", "ooms"))

    def _reset_counters(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Reset torch's counters for the caller, whose peaks begin anew, and keep what they have shown."""
        self._read_counters()
        before = self._count_retries()
        result = original(*args, **kwargs)
        self._forgotten_retries += before - self._count_retries()
        return result

    def _count_card_bytes(self, reserved: int) -> int:
        """Return what this process holds on its card, at least the bytes reserved; without NVML, what all hold."""
        known = self._read_card(lambda visible, nvml: read_process_bytes(visible, os.getpid(), nvml))
        if known is not None and known >= reserved:  # fewer are those of a process of another pid namespace
            return known
        used = self._read_card(read_used_bytes)
        if used is None:
            free, total = self.cuda.mem_get_info(self.local_rank)
            used = total - free
        return max(reserved, used - self._used_before)

    def _read_card(self, read: Callable[[str | None, Any], Sequence[int | None] | None]) -> int | None:
        """Return what NVML tells of this rank's card; None if it does not."""
        sizes = read(os.environ.get("CUDA_VISIBLE_DEVICES"), self.nvml)
        return sizes[self.local_rank] if sizes is not None and self.local_rank < len(sizes) else None


def make_meter(device: str, limit_bytes: int | None, local_rank: int) -> Meter:
    """Return the meter of a rank on this device, which names its class."""
    meter: Meter = pkgutil.resolve_name(find_device(device).meter)(limit_bytes, local_rank)
    return meter


def growth_per_step(held_bytes: Sequence[int]) -> int | None:
    """Return the bytes by which the memory in use grows from step to step: 0 if it does not, None for too few steps.

    `held_bytes` are those after each optimizer step. The second may differ from the first by optimizer states and by
    what ZeRO-3 keeps gathered once it knows the order of the modules. Thereafter a leak makes each step hold more than
    the one before. Batches of varying length make some hold less.
    """
    growth = [after - before for before, after in pairwise(held_bytes[1:])]
    if len(growth) < FEWEST_GROWTHS:
        return None
    usual = int(statistics.median(growth))
    return usual if min(growth) > 0 and usual >= _LEAST_GROWTH else 0


def status_bytes(*names: str) -> dict[str, int]:
    """Return fields of this process's status that are given in kB, in bytes; fields that it lacks are left out."""
    return processes.status_bytes("self", *names)


def read_private_bytes() -> int:
    """Return the resident private memory of this process: without pages of files and shared pages."""
    return _read_statm()[1]


@functools.lru_cache(maxsize=1)
def _open_statm(pid: int) -> int:
    """Open this process's file once: in the midst of training, opening it takes longer than reading it."""
    return os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)


def _read_statm() -> tuple[int, int]:
    """Return the bytes of this process's data and stacks, and its resident private memory."""
    _, resident, shared, _, _, data, _ = map(int, os.pread(_open_statm(os.getpid()), 128, 0).split())
    return data * _PAGE, (resident - shared) * _PAGE


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def _read_malloc() -> _MallocInfo | None:
    """Return what malloc holds now; None if the C library is not glibc 2.33 or later."""
    mallinfo = getattr(_LIBC, "mallinfo2", None)
    if mallinfo is None:
        return None
    mallinfo.restype = _MallocInfo
    info: _MallocInfo = mallinfo()
    return info


def read_mapped_bytes() -> tuple[int, int]:
    """Return the bytes that malloc holds in mappings: now, and at most since the process (or its parent) began.

    Both are 0 if the C library is not glibc 2.33 or later. malloc_stats writes the second to file descriptor 2 alone.
    """
    heap = _read_malloc()
    if heap is None:
        return 0, 0
    sys.stderr.flush()
    before = os.dup(2)
    with open(os.memfd_create("malloc_stats"), "rb") as memory:
        try:
            os.dup2(memory.fileno(), 2)
            _LIBC.malloc_stats()
        finally:
            os.dup2(before, 2)
            os.close(before)
        memory.seek(0)
        most = _MAX_MMAP.search(memory.read())
    return (heap.hblkhd, int(most[1])) if most else (0, 0)
