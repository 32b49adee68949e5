"""Load everything before ranks are forked, and know when forking is not safe."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import logging
import os
import sysconfig
from collections.abc import Callable
from typing import Any

from ..types import WorkloadSource
from ..workload.script_source import script_imports

_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED
_MOST_OPEN = 64
Loaded = Callable[[str], Any]


def loaded(name: str) -> Any:
    """That library, if this process has it loaded already; else None."""
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
    except OSError:
        return None


def is_cuda_initialized(loaded: Loaded = loaded) -> bool:
    """Whether somebody called cuInit here. torch knows of its own call alone; packages ask the driver themselves."""
    cuda = loaded("libcuda.so.1")
    return cuda is not None and cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED


def shut_nvml_down(loaded: Loaded = loaded) -> None:
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


def has_device_open(links: Callable[[], list[str]] | None = None) -> bool:
    """Whether this process has the device open that CUDA alone works with; NVML opens others."""
    return any(link.startswith("/dev/nvidia-uvm") for link in (links or _links)())


def _links() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


# Imported by DeepSpeed at the first initialize or step; each costs tenths of a second in every rank otherwise.
_LATE = (
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.bf16_optimizer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper",
    "torch.distributed.fsdp",
    "torch.utils.checkpoint",
    "transformers.integrations.deepspeed",
)

_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def preload() -> None:
    """Import torch and DeepSpeed, and the modules that DeepSpeed would import in its first step."""
    import torch

    torch.set_num_threads(1)  # a parent that ran a parallel OpenMP region makes children with threads hang
    _import_all()


def preload_script(source: WorkloadSource) -> None:
    """Import what a script imports of installed packages; never what lies beside it, which is its own to run."""
    for one in script_imports(source):
        if not _is_installed(one.module.partition(".")[0]):
            continue
        with contextlib.suppress(Exception):  # what is wrong with it is said where the script imports it
            module = importlib.import_module(one.module)
            if one.name is not None:
                getattr(module, one.name)  # packages such as transformers load their parts when they are asked for


def _is_installed(package: str) -> bool:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None and spec.origin.startswith(_INSTALLED)


def _import_all() -> None:
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # The ranks stand in for GPUs and speak gloo; the shared-memory op would cost a build of 20 s and leave files.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for name in _LATE:
        with contextlib.suppress(ImportError):  # another version of DeepSpeed may lack it
            importlib.import_module(name)


def freeze() -> None:
    """After the last import: what lives now is shared by all ranks and never collected."""
    gc.collect()
    gc.freeze()


def find_fork_hazard() -> str | None:
    """Why ranks must not be forked from this process, if so: CUDA or threads do not survive a fork. NVML is let go."""
    import torch

    if os.environ.get("AUTODS_SPAWN"):
        return "AUTODS_SPAWN is set"
    shut_nvml_down()
    if torch.cuda.is_initialized() or is_cuda_initialized() or has_device_open():  # type: ignore[no-untyped-call]
        return "CUDA was initialised while importing"
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"{threads - 1} threads were started while importing"
    return None
