"""Import everything before ranks are forked, and find out whether forking is safe."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.util
import logging
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..devices import find_device
from ..plain_text import read_text
from ..system import processes
from ..types import WorkloadSource
from .patching import declare

_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED
_MOST_NVML_USERS = 64
FindLibrary = Callable[[str], Any]


def find_loaded_library(name: str) -> Any:
    """Return the shared library if this process has loaded it; else None."""
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
    except OSError:
        return None


def is_cuda_initialized(find: FindLibrary = find_loaded_library) -> bool:
    """Whether cuInit was called in this process. torch knows its calls only; other packages call it, too."""
    cuda = find("libcuda.so.1")
    return cuda is not None and cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED


def shut_nvml_down(find: FindLibrary = find_loaded_library) -> None:
    """Shut NVML down completely. DeepSpeed and torch open it when they are imported, and keep it open.

    A forked rank closes the descriptors that it inherits, and NVML would go on using their numbers. So NVML must not
    be open at the fork; the meter of a CUDA rank opens it again.
    """
    nvml = find("libnvidia-ml.so.1")
    if nvml is not None:
        for _ in range(_MOST_NVML_USERS):
            if nvml.nvmlShutdown() != 0:  # it was not open
                return


def has_device_open(open_files: Iterable[str] | None = None) -> bool:
    """Whether this process has the device file open that only CUDA uses; NVML opens others."""
    if open_files is None:
        open_files = (os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))
    return any(path.startswith("/dev/nvidia-uvm") for path in open_files)


# DeepSpeed imports these at the first initialize or step, which costs each rank tenths of a second for each of them.
_LATE = (
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.bf16_optimizer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper",
    "torch._dynamo.callback",
    "torch.distributed.fsdp",
    "torch.utils.checkpoint",
)


def preload() -> None:
    """Import torch and DeepSpeed, and the modules that DeepSpeed would import in its first step."""
    import torch

    torch.set_num_threads(1)  # a parent that ran a parallel OpenMP region makes children with threads hang
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # A device without such ops accesses nothing: DeepSpeed would look at all ops, which can initialise CUDA.
    for op in find_device(get_accelerator().device_name()).omitted_ops:
        deepspeed.ops.__compatible_ops__[op] = False
    for name in _LATE:
        with contextlib.suppress(ImportError):  # other versions of DeepSpeed may lack it
            importlib.import_module(name)


PROCESSOR = declare(
    "cpuinfo.get_cpu_info",
    "DeepSpeed asks for the processor whenever it loads an op or makes an optimizer on the CPU, and each time it starts"
    " a process for a second",
    optional=True,
)


@functools.cache
def remember_processor() -> None:
    """Ask for the processor once, so that all processes that are forked from this one know the answer.

    It takes 1.2 s, and a rank that offloads its optimizer asks three times.
    """
    if (ask := PROCESSOR.original()) is None:
        return
    answer = functools.cache(ask)
    with contextlib.suppress(Exception):  # a rank meets it, too, and reports it
        answer()
    PROCESSOR.install(answer)


def preload_trainer(source: WorkloadSource) -> None:
    """Import the library that trains in a script, if an adapter changes it. What else the script imports is its own."""
    for name in source.library.preloaded if source.library is not None else ():
        with contextlib.suppress(Exception):  # the adapter's own import reports the error
            importlib.import_module(name)


def freeze() -> None:
    """Keep all present objects out of garbage collection, so that the ranks share their memory."""
    gc.collect()
    gc.freeze()


def read_process_state(connection: int) -> dict[str, object]:
    """What a workload that is imported must not change in a process that goes on: by the words for a message.

    `connection` is a descriptor that must stay open.
    """
    limits = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
    umask = os.umask(0o077)
    os.umask(umask)
    return {
        "the limits of the process": {name: resource.getrlimit(number) for name, number in limits.items()},
        "the umask": umask,
        "the user": (os.getuid(), os.getgid(), os.geteuid(), os.getegid()),
        "the root folder": (os.stat("/").st_dev, os.stat("/").st_ino),
        "the session": (os.getsid(0), os.getpgrp()),
        "the handler of SIGCHLD": signal.getsignal(signal.SIGCHLD),
        "descriptors": os.fstat(connection).st_ino,
        "sys.modules": sys.modules.get("sys") is sys and "torch" in sys.modules,
        "the processes below it": processes.list_children(),
    }


def find_change(before: Mapping[str, object], connection: int) -> str | None:
    """Return what the import of a workload has changed in this process since `before`; None if nothing."""
    try:
        now = read_process_state(connection)
    except Exception as error:
        return read_text(error)
    return next((f"it changes {name}" for name, value in before.items() if now[name] != value), None)


# NVML of driver 580 starts one thread, and a process forked from it uses CUDA and NCCL as any other (H200, torch 2.11).
_DRIVER_THREAD = re.compile(r"cuda[0-9a-f]{11}")


def _read_thread_names() -> list[str]:
    names = []
    for path in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            names.append((path / "comm").read_text().strip())
    return names


def find_fork_hazard() -> str | None:
    """Return why ranks must not be forked from this process: CUDA or threads, which do not survive a fork.

    None if forking is safe. NVML is shut down.
    """
    import torch

    if os.environ.get("AUTODS_SPAWN"):
        return "AUTODS_SPAWN is set"
    shut_nvml_down()
    if torch.cuda.is_initialized() or is_cuda_initialized() or has_device_open():  # type: ignore[no-untyped-call]
        return "CUDA was initialised while importing"
    started = [name for name in _read_thread_names() if not _DRIVER_THREAD.fullmatch(name)]
    if len(started) > 1:
        return f"{len(started) - 1} threads were started while importing"
    return None
