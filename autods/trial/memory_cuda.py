"""Measure and limit the memory of CUDA ranks, with torch's allocator and NVML."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from typing import Any

from ..system.gpus import read_used_bytes
from .memory_cpu import status_bytes
from .preload import open_nvml


@dataclass(slots=True)
class CudaMeter:
    """The meter of a CUDA rank: `limit_bytes` emulates a smaller card through the allocator's own limit.

    The CUDA context, NCCL and the code of kernels lie outside the allocator. Their bytes are those that NVML counts on
    the card since before this rank began, less the bytes that the allocator reserves. They only grow, so they are read
    when that costs no step time: after initialising, and for the peaks. A rank has its card to itself.

    `cuda` stands for `torch.cuda`, `nvml` for `pynvml` and `accelerator` for DeepSpeed's; None is the real one.
    """

    limit_bytes: int | None
    local_rank: int
    cuda: Any = None
    nvml: Any = None
    accelerator: Any = None
    _private_at_start: int = 0
    _total: int = 0
    _retries_before: int = 0
    _used_before: int | None = None
    _outside_bytes: int | None = None

    def start(self) -> None:
        """Take the card. DeepSpeed sees the emulated size: it flattens on the host where the card is too full."""
        self._used_before = self._used_bytes()  # before this rank's context is made
        open_nvml(self.nvml)
        cuda = self._api()
        cuda.set_device(self.local_rank)
        self._total = int(cuda.get_device_properties(self.local_rank).total_memory)
        if self.limit_bytes is not None and self.limit_bytes < self._total:
            cuda.set_per_process_memory_fraction(self.limit_bytes / self._total, self.local_rank)
            accelerator = self._accelerator()
            accelerator.total_memory = lambda device_index=None: self.limit_bytes
            accelerator.available_memory = lambda device_index=None: self.free_bytes()
        cuda.reset_peak_memory_stats(self.local_rank)
        self._private_at_start = _private_bytes()

    def lift(self) -> None:
        """Keep the limit: results are written from host memory."""

    def sample(self) -> None:
        """Do nothing: the allocator records the peak itself."""

    def peaks(self) -> dict[str, int | None]:
        """`device` is the peak of reserved bytes, which a limit counts; `device_card` adds `device_beside`."""
        cuda = self._api()
        self._update_outside_bytes()
        reserved = int(cuda.max_memory_reserved(self.local_rank))
        return {
            "device": reserved,
            "device_allocated": int(cuda.max_memory_allocated(self.local_rank)),
            "device_beside": self._outside_bytes,
            "device_card": None if self._outside_bytes is None else reserved + self._outside_bytes,
            "host": max(0, _private_bytes(most=True) - self._private_at_start),
            "pinned": self._pinned(),
            **self.allocator(),
        }

    def leave_device(self) -> dict[str, int]:
        """Return nothing: memory for gathering the weights counts as the card's."""
        return {}

    def begin_steps(self) -> None:
        self._update_outside_bytes()
        self._retries_before = 0
        self._retries_before = self.allocator()["alloc_retries"]

    def allocator(self) -> dict[str, int]:
        stats = self._api().memory_stats(self.local_rank)
        idle = stats.get("reserved_bytes.all.current", 0) - stats.get("allocated_bytes.all.current", 0)
        return {"idle_bytes": int(idle), "alloc_retries": int(stats.get("num_alloc_retries", 0)) - self._retries_before}

    def free_bytes(self) -> int | None:
        cuda = self._api()
        free, _ = cuda.mem_get_info(self.local_rank)
        if self.limit_bytes is None:
            return int(free)
        return min(int(free), max(0, self.limit_bytes - int(cuda.memory_reserved(self.local_rank))))

    def synchronize(self) -> None:
        self._api().synchronize(self.local_rank)

    def _update_outside_bytes(self) -> None:
        used = self._used_bytes()
        if used is not None and self._used_before is not None:
            outside_bytes = used - self._used_before - int(self._api().memory_reserved(self.local_rank))
            self._outside_bytes = max(outside_bytes, self._outside_bytes or 0, 0)

    def _used_bytes(self) -> int | None:
        """Return the bytes in use on this rank's card, by any process; None if NVML does not tell."""
        used = read_used_bytes(os.environ.get("CUDA_VISIBLE_DEVICES"), self.nvml)
        return used[self.local_rank] if used is not None and self.local_rank < len(used) else None

    def _pinned(self) -> int | None:
        """Return the peak of page-locked bytes after rounding; None if torch does not count them."""
        stats: Any = getattr(self._api(), "host_memory_stats", dict)()
        # The allocator's own bytes, in use or cached: older releases of torch call them reserved, newer ones allocated.
        peak = stats.get("reserved_bytes.peak", stats.get("allocated_bytes.peak"))
        return None if peak is None else int(peak)

    def _api(self) -> Any:
        if self.cuda is None:
            import torch

            self.cuda = torch.cuda
        return self.cuda

    def _accelerator(self) -> Any:
        if self.accelerator is None:
            from deepspeed.accelerator import get_accelerator

            self.accelerator = get_accelerator()
        return self.accelerator


def _private_bytes(*, most: bool = False) -> int:
    """Return the resident private memory of this process, now or at its peak.

    The /proc of a sandbox such as gVisor has no private memory: there, all resident memory counts.
    """
    now = status_bytes("RssAnon", "VmHWM", "RssFile", "RssShmem", "VmRSS")
    if not {"RssAnon", "VmHWM", "RssFile", "RssShmem"} <= set(now):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if most else now.get("VmRSS", 0)
    return now["VmHWM"] - now["RssFile"] - now["RssShmem"] if most else now["RssAnon"]
