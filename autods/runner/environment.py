"""The environment variables of a node's ranks: those that reach it from the fit's process, and those of a zygote."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from ..rank.ops import ops_folder
from ..system.gpus import uuids_to_indices
from ..system.host import cache_folder
from ..types import Device

# Prefixes of the variables that training reads. The first line has those of the `deepspeed` launcher.
_TRAINING = (
    "MLFLOW", "PYTHON", "MV2", "UCX", "NCCL",
    "ACCELERATE", "AUTODS", "CUBLAS", "CUDA", "CUDNN", "DEEPSPEED", "DS_", "FI_", "GLOO", "HF_", "KMP_", "MKL_",
    "NVTE_", "OMP_", "PYTORCH", "TOKENIZERS_", "TORCH", "TRANSFORMERS", "TRITON",
)  # fmt: skip
_SECRET = re.compile(r"TOKEN(?!IZERS)|SECRET|PASSW|CREDENTIAL|KEY$")
_OF_ONE_NODE = ("CUDA_VISIBLE_DEVICES",)


def choose_exported(environment: Mapping[str, str], also: Sequence[str]) -> dict[str, str]:
    """Return the variables of the fit's process that the nodes of a cluster get.

    These are the variables of training without secrets, and those that the user names in `also`, such as DATA or
    WANDB_*. The nodes have a PATH, a HOME and a TMPDIR of their own.
    """

    def is_exported(name: str) -> bool:
        is_for_training = name.startswith(_TRAINING) and name not in _OF_ONE_NODE and not _SECRET.search(name)
        return is_for_training or any(fnmatchcase(name, pattern) for pattern in also)

    return {name: value for name, value in environment.items() if is_exported(name)}


def join_node_environment(exported: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of this node's agent with the exported variables, without what Ray set for itself."""
    return {**{name: value for name, value in os.environ.items() if not name.startswith("RAY_")}, **exported}


_ALWAYS = {
    "OMP_NUM_THREADS": "1",  # a process with OpenMP threads must not fork; ranks get their number in `rank.worker`
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_ON_CPU = {
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    # Without these a memory budget is used up by per-thread arenas and by freed memory that malloc keeps.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
# Neither torch nor DeepSpeed may initialise CUDA before the fork. DeepSpeed counts the cards to find its accelerator,
# and torch cannot count a MIG slice without CUDA. Older releases of DeepSpeed ask the card for its capability, too.
_ON_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "DS_ACCELERATOR": "cuda", "DS_IGNORE_CUDA_DETECTION": "1"}
_CUDA_DEFAULTS = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # NVML's order; CUDA's default puts the fastest GPU first
    "NCCL_DEBUG": "WARN",  # else NCCL does not report why it failed, for example that memory ran out
}


def zygote_environment(device: Device, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a zygote: these, and those that forking, memory budgets and caches need."""
    variables = {**environment, **_ALWAYS, "TORCH_EXTENSIONS_DIR": str(ops_folder())}
    # By default torch.compile's cache, Triton's below it, is in TMPDIR, and a trial of a script has one of its own.
    # Their keys are digests and their files are renamed into place, so that all ranks may write at once.
    variables.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "torchinductor"))
    scripts = os.path.dirname(sys.executable)  # ninja lives there
    variables["PATH"] = os.pathsep.join([scripts, environment.get("PATH", "")])
    package = Path(__file__).parents[2]
    if "runtime_resources" in package.parts:  # Ray brought the package here: the zygote has to find the same
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(package), environment.get("PYTHONPATH", "")]))
    if device == "cpu":
        return variables | _ON_CPU
    variables = _CUDA_DEFAULTS | variables | _ON_CUDA
    if (assigned := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:  # the GPUs that Ray gave this actor
        assigned = _sort_as(environment.get("CUDA_VISIBLE_DEVICES", ""), assigned)
        variables["CUDA_VISIBLE_DEVICES"] = uuids_to_indices(assigned)
        if variables["CUDA_VISIBLE_DEVICES"] != assigned:
            variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order that those indices count in
    return variables


def _sort_as(users: str, assigned: str) -> str:
    """Return the assigned cards in the user's order, else by number: Ray gives them in any order."""
    order = users.split(",")
    names = assigned.split(",")
    return ",".join(
        sorted(names, key=lambda name: (order.index(name) if name in order else len(order), len(name), name))
    )
