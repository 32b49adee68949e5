"""What the zygote imports once, so that no rank pays for it: a new process costs 10 s, a fork 0.02 s."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import logging
import os
import sysconfig
from collections.abc import Mapping
from typing import Any

from ..values import WorkloadSource
from ..workload.script import all_imports
from . import driver, lean
from .processor import remember

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


def preload(processor: Mapping[str, Any] | None = None) -> None:
    """Import torch and DeepSpeed and everything that they import late. processor: what py-cpuinfo is to say."""
    import torch

    torch.set_num_threads(1)  # a parent that ran a parallel OpenMP region makes children with threads hang
    remember(processor)
    with lean.nothing_compiled():  # DeepSpeed's Muon decorates three functions; that alone loads inductor
        _import_all()


def preload_script(source: WorkloadSource) -> None:
    """Import what a script imports of installed packages; never what lies beside it, which is its own to run."""
    for one in all_imports(source):
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


def settle() -> None:
    """After the last import: what lives now is shared by all ranks and never collected."""
    gc.collect()
    gc.freeze()


def unfit_to_fork() -> str | None:
    """Why ranks must not be forked from this process, if so: CUDA or threads do not survive a fork. NVML is let go."""
    import torch

    if os.environ.get("AUTODS_SPAWN"):
        return "AUTODS_SPAWN is set"
    driver.let_go_of_nvml()
    if torch.cuda.is_initialized() or driver.began() or driver.holds_device():  # type: ignore[no-untyped-call]
        return "CUDA was initialised while importing"
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"{threads - 1} threads were started while importing"
    return None
