"""The environment of ranks: variables that reach their node, of a zygote and of a rank, and a rank's cores."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from ..config.deepspeed import find_offloads
from ..devices import DEVICES, find_device
from ..devices.base import EXPANDABLE
from ..errors import InputError
from ..rank.job import RankJob
from ..rank.launch_variables import tell_rank
from ..rank.ops import ops_folder
from ..system.host import cache_folder, find_interface, read_numa_cores, share_cores

# Prefixes of the variables that training reads. The first line has those of the `deepspeed` launcher.
_TRAINING = (
    "MLFLOW", "PYTHON", "MV2", "UCX", "NCCL",
    "ACCELERATE", "AUTODS", "CUBLAS", "CUDA", "CUDNN", "DEEPSPEED", "DS_", "FI_", "GLOO", "HF_", "KMP_", "MKL_",
    "NVTE_", "OMP_", "PYTORCH", "TOKENIZERS_", "TORCH", "TRANSFORMERS", "TRITON",
)  # fmt: skip
_SECRET = re.compile(r"TOKEN(?!IZERS)|SECRET|PASSW|CREDENTIAL|KEY$")


def choose_exported(environment: Mapping[str, str], also: Sequence[str]) -> dict[str, str]:
    """Return the variables of the fit's process that the nodes of a cluster get.

    These are the variables of training without secrets, and those that the user names in `also`, such as DATA or
    WANDB_*. The nodes have a PATH, a HOME and a TMPDIR of their own.
    """

    of_one_node = {device.visible_variable for device in DEVICES.values()}

    def is_exported(name: str) -> bool:
        is_for_training = name.startswith(_TRAINING) and name not in of_one_node and not _SECRET.search(name)
        return is_for_training or any(fnmatchcase(name, pattern) for pattern in also)

    return {name: value for name, value in environment.items() if is_exported(name)}


def join_node_environment(exported: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of this node's agent with the exported variables, without what Ray set for itself."""
    return {**{name: value for name, value in os.environ.items() if not name.startswith("RAY_")}, **exported}


_ALWAYS = {
    "OMP_NUM_THREADS": "1",  # a process with OpenMP threads must not fork; ranks get their number below
    "MKL_NUM_THREADS": "1",
}


GROUP_TIMEOUT = "DEEPSPEED_TIMEOUT"  # minutes, which DeepSpeed reads when it is imported
_GROUP_MINUTES = str(4 * 60)


def check_group_timeout(variables: Mapping[str, str]) -> None:
    """Raise InputError where DeepSpeed could not read its timeout: it does so when it is imported, on each node."""
    minutes = variables.get(GROUP_TIMEOUT, _GROUP_MINUTES)
    try:
        is_wrong = int(minutes) <= 0
    except ValueError:
        is_wrong = True
    if is_wrong:
        hint = "give the minutes for which ranks wait for each other, or unset it"
        raise InputError("is no whole number above 0", place=f"{GROUP_TIMEOUT}={minutes}", hint=hint)


def zygote_environment(device: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a zygote: these, and those that forking, the device and caches need."""
    variables = {**environment, **_ALWAYS, "TORCH_EXTENSIONS_DIR": str(ops_folder())}
    # DeepSpeed's groups would end a collective after 10 minutes, 30 before 0.19.6: in a long load, that of a rank that
    # still loads. Here the limits of a trial or a run end ranks that are stuck. They miss a host that spins for its
    # card in a script's own code, as if it computed (`runner.silence`): for that one NCCL's watchdog keeps a limit.
    variables.setdefault(GROUP_TIMEOUT, _GROUP_MINUTES)
    variables.setdefault("TOKENIZERS_PARALLELISM", "false")  # by default its threads would warn of each fork
    # By default torch.compile's cache, Triton's below it, is in TMPDIR, and a trial of a script has one of its own.
    # Their keys are digests and their files are renamed into place, so that all ranks may write at once.
    variables.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "torchinductor"))
    scripts = os.path.dirname(sys.executable)  # ninja lives there
    variables["PATH"] = os.pathsep.join([scripts, environment.get("PATH", "")])
    package = Path(__file__).parents[2]
    if "runtime_resources" in package.parts:  # Ray brought the package here: the zygote has to find the same
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(package), environment.get("PYTHONPATH", "")]))
    kind = find_device(device)
    # Ray has set the visible variable of this agent to the cards that it gave it.
    return kind.complete_environment(variables, os.environ.get(kind.visible_variable or ""))


def rank_environment(job: RankJob, slot: int, port: int) -> dict[str, str]:
    """Return this process's environment with a launcher's variables and those of the rank's threads and allocator."""
    variables = tell_rank(
        rank=job.local_ranks[slot],
        local_rank=slot,
        world_size=job.world_size,
        local_world_size=len(job.local_ranks),
        node_rank=job.node_rank,
        address=job.master_address,
        port=port,
    )
    if job.master_address == "127.0.0.1":
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    elif (interface := find_interface(job.node_address)) is not None:
        # By default gloo resolves the host's name, which is a loopback address on many machines. NCCL looks for the
        # fastest interfaces by itself, which need not be Ray's.
        variables["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", interface)
    # The host works in CUDA jobs as well: an offloaded optimizer takes all cores that it gets.
    variables["OMP_NUM_THREADS"] = variables["MKL_NUM_THREADS"] = str(job.rank_threads)
    if job.expandable:
        variables |= find_device(job.device).set_allocator(os.environ, EXPANDABLE)
    return {**os.environ, **variables}


# The user's own binding of threads, with which ours would conflict.
_BINDING = ("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES")


def choose_cores(job: RankJob, slot: int) -> tuple[int, ...]:
    """Return the processors to which a rank is bound; none where it may use all.

    States on the host are updated there. So a rank with such states keeps to its share of the cores, as DeepSpeed's
    `--bind_cores_to_rank` has it, and the kernel places its memory beside them. The user's own binding goes before.
    Ranks on processors are not bound: all of their rungs would gain, and be compared with each other unbound or bound.
    """
    device = find_device(job.device)
    if not device.has_cards or not find_offloads(job.ds_config) or any(os.environ.get(name) for name in _BINDING):
        return ()
    ranks = len(job.local_ranks)
    cards = device.find_numa_nodes()[:ranks]
    shares = share_cores(read_numa_cores(), [*cards, *[None] * (ranks - len(cards))])
    return shares[slot] if shares and job.rank_threads <= len(shares[slot]) else ()
