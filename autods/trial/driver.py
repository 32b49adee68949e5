"""CUDA's driver and NVML in this process: whether they began, asked without beginning either. A fork depends on it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
from collections.abc import Callable
from typing import Any

_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED
_MOST_OPEN = 64

Loaded = Callable[[str], Any]


def loaded(name: str) -> Any:
    """That library, if this process has it loaded already; else None."""
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
    except OSError:
        return None


def began(loaded: Loaded = loaded) -> bool:
    """Whether somebody called cuInit here. torch knows of its own call alone; packages ask the driver themselves."""
    cuda = loaded("libcuda.so.1")
    return cuda is not None and cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED


def let_go_of_nvml(loaded: Loaded = loaded) -> None:
    """Shut NVML down, however often it was opened: DeepSpeed and torch open it when they are imported, and keep it.

    A forked rank closes what it inherits, NVML's descriptors too, and NVML would go on using their numbers. So nothing
    of it may be open at the fork, and the rank opens it anew (`open_nvml`).
    """
    nvml = loaded("libnvidia-ml.so.1")
    if nvml is not None:
        for _ in range(_MOST_OPEN):
            if nvml.nvmlShutdown() != 0:  # it was not open
                return


def open_nvml(nvml: Any = None) -> None:
    """For a rank's life: DeepSpeed asks it how much of the card is free, and expects it open since the import."""
    if nvml is None:
        nvml = importlib.import_module("pynvml")
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlInit()


def holds_device(links: Callable[[], list[str]] | None = None) -> bool:
    """Whether this process has the device open that CUDA alone works with; NVML opens others."""
    return any(link.startswith("/dev/nvidia-uvm") for link in (links or _links)())


def _links() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found
