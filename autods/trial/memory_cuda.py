"""Peak bytes of one rank on a card: what torch's allocator gave out and reserved, and what NVML says the card held.

`cuda` stands for `torch.cuda`, `nvml` for `pynvml`, `accelerator` for DeepSpeed's; None: the real one.
"""

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
    """A CUDA rank: `limit_bytes` emulates a smaller card through the allocator's own limit.

    What lies beside the allocator, the CUDA context, NCCL and the kernels' code, is what NVML counts on the card since
    before this rank began, less what the allocator reserves. It only grows, so it is looked at when it costs no step
    time: at the end of initialising and when the peaks are asked for. A rank has its card to itself.
    """

    limit_bytes: int | None
    local_rank: int
    cuda: Any = None
    nvml: Any = None
    accelerator: Any = None
    _private_at_start: int = 0
    _total: int = 0
    _retries_before: int = 0
    _held_before: int | None = None
    _beside: int | None = None

    def start(self) -> None:
        """Take the card. DeepSpeed is told of the emulated one: it flattens on the host where the card is too full."""
        self._held_before = self._held()  # before this rank's context is made
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
        """Nothing to lift: results are written from host memory."""

    def sample(self) -> None:
        """The allocator keeps its own peak."""

    def peaks(self) -> dict[str, int | None]:
        """device: reserved at most, which is what a limit counts. device_card: with what lies beside it."""
        cuda = self._api()
        self._look()
        reserved = int(cuda.max_memory_reserved(self.local_rank))
        return {
            "device": reserved,
            "device_allocated": int(cuda.max_memory_allocated(self.local_rank)),
            "device_beside": self._beside,
            "device_card": None if self._beside is None else reserved + self._beside,
            "host": max(0, _private_bytes(most=True) - self._private_at_start),
            "pinned": self._pinned(),
            **self.allocator(),
        }

    def leave_device(self) -> dict[str, int]:
        """The card is still the card: what gathering the weights needs there counts."""
        return {}

    def begin_steps(self) -> None:
        self._look()
        self._retries_before = 0
        self._retries_before = self.allocator()["alloc_retries"]

    def allocator(self) -> dict[str, int]:
        said = self._api().memory_stats(self.local_rank)
        idle = said.get("reserved_bytes.all.current", 0) - said.get("allocated_bytes.all.current", 0)
        return {"idle_bytes": int(idle), "alloc_retries": int(said.get("num_alloc_retries", 0)) - self._retries_before}

    def free_bytes(self) -> int | None:
        cuda = self._api()
        free, _ = cuda.mem_get_info(self.local_rank)
        if self.limit_bytes is None:
            return int(free)
        return min(int(free), max(0, self.limit_bytes - int(cuda.memory_reserved(self.local_rank))))

    def synchronize(self) -> None:
        self._api().synchronize(self.local_rank)

    def _look(self) -> None:
        held = self._held()
        if held is not None and self._held_before is not None:
            beside = held - self._held_before - int(self._api().memory_reserved(self.local_rank))
            self._beside = max(beside, self._beside or 0, 0)

    def _held(self) -> int | None:
        """Bytes of our card that are in use, by whomever."""
        held = read_used_bytes(os.environ.get("CUDA_VISIBLE_DEVICES"), self.nvml)
        return held[self.local_rank] if held is not None and self.local_rank < len(held) else None

    def _pinned(self) -> int | None:
        """Page-locked bytes at most, with what rounding adds; None where torch does not count them."""
        said: Any = getattr(self._api(), "host_memory_stats", dict)()
        # What the allocator owns, whether in use or cached: torch calls it so now, and called it reserved at first,
        # when allocated was what is in use.
        peak = said.get("reserved_bytes.peak", said.get("allocated_bytes.peak"))
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
    """Resident private memory of this process, now or at most.

    A sandbox's /proc (gVisor's) does not tell private from shared: there it is all of the resident memory.
    """
    now = status_bytes("RssAnon", "VmHWM", "RssFile", "RssShmem", "VmRSS")
    if not {"RssAnon", "VmHWM", "RssFile", "RssShmem"} <= set(now):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if most else now.get("VmRSS", 0)
    return now["VmHWM"] - now["RssFile"] - now["RssShmem"] if most else now["RssAnon"]
