"""Import everything before ranks are forked, and find out whether forking is safe."""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..config.trainers import find_library
from ..devices import DEVICES, find_device
from ..plain_text import read_text
from ..system import processes
from ..types import WorkloadSource
from ..workload.script_source import find_early_variables, find_packages, prepares_imports
from .partial_offload import mend_partial_offload
from .patching import declare

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
_COMPILE = declare("torch.compile", "the import of DeepSpeed's Muon must not import torch's inductor")


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
    with _COMPILE.installed(functools.partial(compile_at_first_call, _COMPILE.original())):
        for name in _LATE:
            with contextlib.suppress(ImportError):  # other versions of DeepSpeed may lack it
                importlib.import_module(name)
    mend_partial_offload()


def compile_at_first_call(compile: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """A stand-in for the decorator `compile`, which imports torch's inductor at once: a second for each process."""
    compiled = functools.cache(lambda: compile(function))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call


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


# What models of a package need of it: over a second of a processor for each rank of each trial.
_SHARED = {"transformers": "transformers.modeling_utils"}


def preload_trainer(source: WorkloadSource) -> None:
    """Import the library that trains in a script, and what models of transformers need where it imports that.

    What else the script imports is its own. Libraries read variables such as HF_HOME at import: where the script sets
    some before, or changes where modules come from, each rank imports them.
    """
    library = find_library(source)
    names = [] if library is None or find_early_variables(source) else [*library.preloaded]
    if not prepares_imports(source):
        names += [module for package, module in _SHARED.items() if package in find_packages(source)]
    for name in names:
        with contextlib.suppress(Exception):  # the import of the adapter or the script reports the error
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


def _read_thread_names() -> list[str]:
    names = []
    for path in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            names.append((path / "comm").read_text(errors="replace").strip())
    return names


def find_fork_hazard(during: str = "importing") -> str | None:
    """Return why ranks must not be forked from this process: a device in use or threads, which do not survive a fork.

    None if forking is safe. `during` says what has brought it about.
    """
    if os.environ.get("AUTODS_SPAWN"):
        return "AUTODS_SPAWN is set"
    for device in DEVICES.values():
        if (hazard := device.find_fork_hazard()) is not None:
            return hazard
    harmless = [device.driver_threads for device in DEVICES.values() if device.driver_threads]
    names = (name for name in _read_thread_names() if not any(re.fullmatch(each, name) for each in harmless))
    if (started := len(list(names)) - 1) > 0:
        return f"{started} threads were started while {during}"
    return None
