"""Signatures of failures as rows, the most specific first. A row matches on types, text and the device that ran."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ..values import Action, Device, FailureKind
from .evidence import Evidence

# Which tier a full allocation means: on CPU ranks the budgeted process memory is the device.
MemoryTier = Literal["device", "host", "pinned", "shm", "nvme"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One row. `tier` says it is memory; otherwise `kind` and `action` say what it is."""

    pattern: str
    types: tuple[str, ...] = ()  # any of the exception's types; empty: any
    device: Device | None = None
    stack: str | None = None  # a function that must be on the stack, or in the traceback
    tier: MemoryTier | None = None
    kind: FailureKind = "unknown"
    action: Action = "leaner_rung"
    advice: str = ""

    def matches(self, evidence: Evidence) -> bool:
        """Type, then device, then stack, then text."""
        if self.types and not set(self.types) & set(evidence.types):
            return False
        if self.device and self.device != evidence.device:
            return False
        if self.stack and not re.search(self.stack, evidence.traceback):
            return False
        return re.search(self.pattern, evidence.text, re.IGNORECASE) is not None


_FULL_HOST = (
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|std::bad_alloc|Cannot allocate memory"
    r"|can't start new thread|unable to mmap \d+ bytes|nullptr != pinned_buffer"
)

ROWS: tuple[Signature, ...] = (
    # NVMe and disk.
    Signature(
        pattern=r"No space left on device|buffer nbytes != file bytes|file_offset \+ buffer nbytes > file bytes",
        tier="nvme",
        action="leaner_rung",
        advice="free space under --nvme-path",
    ),
    Signature(
        pattern=r"insufficient shared memory|unable to (allocate|write).*(/dev/shm|shm)",
        tier="shm",
        action="fix_environment",
        advice="enlarge /dev/shm (docker run --shm-size=8g); no rung helps",
    ),
    # Never memory, whatever the words.
    Signature(
        pattern=r"out of resource: shared memory|device-side assert|CUBLAS_STATUS_NOT_INITIALIZED.*label",
        kind="user_code",
        action="fix_code",
        advice="a kernel failed; no rung helps",
    ),
    # Pinned host memory wears the GPU's words.
    Signature(
        pattern=r"out of memory|invalid argument|OS call failed",
        device="cuda",
        stack=r"pin_memory|cudaHostAlloc|HostAllocator",
        tier="pinned",
        action="less_host_memory",
        advice='set "pin_memory": false',
    ),
    # The device.
    Signature(pattern=r"", types=("OutOfMemoryError",), tier="device"),
    Signature(
        pattern=r"(CUDA|HIP|XPU|MPS backend|NPU) out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
        r"|Cuda failure.*out of memory|Failed to CUDA calloc",
        tier="device",
    ),
    Signature(pattern=_FULL_HOST, device="cpu", tier="device"),
    Signature(pattern=r"", types=("MemoryError",), device="cpu", tier="device"),
    # A thread's stack does not fit into the budget: gloo starts some, and says only this.
    Signature(pattern=r"Resource temporarily unavailable", types=("RuntimeError",), device="cpu", tier="device"),
    # The host under a GPU rank.
    Signature(pattern=_FULL_HOST, tier="host", action="less_host_memory"),
    Signature(pattern=r"", types=("MemoryError",), tier="host", action="less_host_memory"),
    # The toolchain.
    Signature(
        pattern=r"Error building extension|Unable to JIT load|Ninja is required|CUDA_HOME|does not match the version"
        r"|CUDAMismatchException|libaio",
        kind="toolchain",
        action="fix_environment",
        advice="run ds_report, and install what it says is missing",
    ),
    # What DeepSpeed refuses.
    Signature(
        pattern=r"is not supported on your device|is not supported by the current accelerator|not supported on CPU",
        kind="config",
        action="fix_config",
        advice="choose another precision: --precision bf16 or fp32",
    ),
    Signature(
        pattern=r"",
        types=("DeepSpeedConfigError", "ZeRORuntimeException", "ValidationError"),
        kind="config",
        action="fix_config",
        advice="DeepSpeed refuses this config",
    ),
    Signature(
        pattern=r"train_batch_size is not equal to|Check batch related parameters",
        kind="config",
        action="fix_config",
        advice="keep train_batch_size alone in the base config",
    ),
    # Another rank holds the cause.
    Signature(
        pattern=r"closed by peer|Connection reset|Broken pipe|recv failed|Socket closed|Connection refused"
        r"|failed to recv|peer died|Timed out waiting|NCCL watchdog|remote process exited",
        kind="secondary",
        action="retry",
        advice="another rank went first",
    ),
)


def first_match(evidence: Evidence) -> Signature | None:
    """The first row that matches."""
    return next((row for row in ROWS if row.matches(evidence)), None)
