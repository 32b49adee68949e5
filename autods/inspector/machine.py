"""Checks of the machine: cards, memory, limits of processes, and variables that slow training down."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ..devices import CPU, CUDA, describe_shared_cards
from ..devices.torch_build import TorchBuild, read_torch_build
from ..errors import EnvironmentBroken, InputError
from ..files import find_existing
from ..report.results.doctor import Check
from ..runner.health import Preflight
from ..system import landlock, processes
from ..system.host import Hardware, read_cpu_quota
from ..units import format_bytes

ReadLimit = Callable[[int], tuple[int, int]]  # a resource → its soft and its hard limit
_GIB = 2**30
_MIB = 2**20
_LEAST_SHARED = _GIB  # NCCL takes some MiB a pair of ranks, DataLoader workers a batch each
_TOO_LITTLE_SHARED = 32 * _MIB  # half of what docker gives, so that a small file there decides nothing
_LEAST_FREE = 2 * _GIB
_LEAST_LOCKED = 64 * _MIB  # DeepSpeed's async_io locks its buffers
_CAP_IPC_LOCK = 14
_LEAST_FILES = 4096
# Variable → (values that slow training down, what they do).
_SLOW: Mapping[str, tuple[Callable[[str], bool], str]] = {
    "NCCL_P2P_DISABLE": (lambda value: value == "1", "cards do not copy to each other directly"),
    "NCCL_SHM_DISABLE": (lambda value: value == "1", "cards of one node use the network instead of shared memory"),
    "NCCL_IB_DISABLE": (lambda value: value == "1", "nodes use Ethernet instead of InfiniBand"),
    "NCCL_NET_GDR_LEVEL": (lambda value: value in ("0", "LOC"), "InfiniBand copies through host memory"),
    "NCCL_ALGO": (bool, "NCCL does not choose its algorithms itself"),
    "NCCL_PROTO": (bool, "NCCL does not choose its protocols itself"),
    "NCCL_DEBUG": (lambda value: value.upper() in ("INFO", "TRACE"), "NCCL writes much to the logs"),
    "CUDA_LAUNCH_BLOCKING": (lambda value: value not in ("", "0"), "the CPU waits for every kernel"),
    "TORCH_DISTRIBUTED_DEBUG": (lambda value: value.upper() == "DETAIL", "every collective is checked first"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (bool, "every tensor is a call of cudaMalloc"),
    "CUDA_DEVICE_MAX_CONNECTIONS": (lambda value: value == "1", "copies and kernels of a card wait for each other"),
}  # fmt: skip


def check_cards(hardware: Hardware, read_build: Callable[[], TorchBuild | None] = read_torch_build) -> Iterator[Check]:
    """The cards, their driver, and other processes on them. `read_build` tells what the installed torch is for."""
    if hardware.unusable is not None:
        problem, _, remedy = hardware.unusable.partition("\n")
        yield Check.broken("GPUs", "cards", problem, remedy.strip())
        return
    if not hardware.cards:
        result = "none: CPU ranks can stand in for them (--device cpu), and `autods plan` needs none"
        remedy, build = "nvidia-smi shows what the driver sees", read_build()
        if build is not None and build.rocm:
            result = "none of NVIDIA, which trials need: the installed torch is for AMD's (ROCm)"
            remedy = "autods plan works without (--on mi300x-192gb), and CPU ranks can stand in (--device cpu)"
        yield Check.warning("GPUs", "cards", result, remedy)
        if (slow := CPU.judge_precision("bf16", ())) is not None:
            yield Check.warning("GPUs", "CPU ranks", slow.text, slow.remedy)
        return
    names = [f"{card.name} ({format_bytes(card.total_bytes)})" for card in hardware.cards]
    counted = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    yield Check.ok("GPUs", "cards", counted)
    yield Check.ok("GPUs", "driver", f"{hardware.driver}, runs CUDA {hardware.cuda}")
    if len(set(names)) > 1:
        result = "cards differ, and the smallest one limits every rank"
        yield Check.warning("GPUs", "equal cards", result, "choose with CUDA_VISIBLE_DEVICES")
    for sentence in describe_shared_cards(hardware.cards):
        yield Check.warning("GPUs", "shared", sentence, "end them, or choose other cards")
    if (slow := CUDA.judge_precision("bf16", hardware.cards)) is not None:
        yield Check.warning("GPUs", "bf16", slow.text, slow.remedy)


def check_ranks(measure: Callable[[], Preflight]) -> Iterator[Check]:
    """What a fit looks at before its first trial. `measure` starts the ranks."""
    try:
        preflight = measure()
    except (EnvironmentBroken, InputError) as error:  # InputError: a limit of the shell is too low for a rank
        problem, _, remedy = str(error).partition("\n")
        yield Check.broken("GPUs", "ranks", problem, remedy.strip())
        return
    for finding in preflight.findings:
        yield Check.warning("GPUs", "ranks", finding.text, finding.remedy)
    if preflight.links:
        yield Check.ok("GPUs", "links", preflight.links)
    if preflight.reduced_per_s is not None:
        yield Check.ok("GPUs", "all-reduce", f"{format_bytes(preflight.reduced_per_s)}/s from each rank")


def check_memory(hardware: Hardware, *, shared: Path = Path("/dev/shm"), quota: float | None = None) -> Iterator[Check]:
    """Host memory and processors, as containers and groups limit them, and shared memory."""
    free, total = format_bytes(hardware.host_free_bytes), format_bytes(hardware.host_bytes)
    least = sum(card.total_bytes for card in hardware.cards)
    if hardware.host_bytes < least:
        remedy = f"offloading may need more: the cards have {format_bytes(least)} together"
        yield Check.warning("Memory", "host", f"{free} free of {total}", remedy)
    else:
        yield Check.ok("Memory", "host", f"{free} free of {total}")
    cores = os.cpu_count() or 1
    limit = read_cpu_quota() if quota is None else quota
    if limit is not None and limit < cores:
        result = f"{limit:g} of {cores} processors by the container's quota"
        remedy = "CPU offload steps the optimizer on them: raise the limit (docker --cpus)"
        yield Check.warning("Memory", "processors", result, remedy)
    elif hardware.cores < len(hardware.cards):
        result = f"{hardware.cores} for {len(hardware.cards)} cards, and each rank wants one at least"
        yield Check.warning("Memory", "processors", result, "ask for more, as by Slurm's --cpus-per-gpu")
    else:
        yield Check.ok("Memory", "processors", f"{hardware.cores} cores")
    if hardware.numa_nodes > 1:
        install = "" if hardware.numactl else "apt-get install numactl, then "
        remedy = f"bind ranks to the node of their card: {install}deepspeed --bind_cores_to_rank"
        yield Check.ok("Memory", "NUMA", f"{hardware.numa_nodes} nodes", remedy)
    yield from check_shared_memory(shared)


def check_shared_memory(folder: Path) -> Iterator[Check]:
    """Whether shared memory is large enough for ranks, Ray and data loaders."""
    name, remedy = str(folder), f"mount -o remount,size=8G {folder}, or docker run --shm-size=8g"
    try:
        usage = shutil.disk_usage(folder)
        free = usage.free
    except OSError as error:
        yield Check.broken("Memory", name, f"cannot be used: {error.strerror}", remedy)
        return
    result = f"{format_bytes(free)} free of {format_bytes(usage.total)}"
    if free >= _LEAST_SHARED:
        yield Check.ok("Memory", name, result)
    else:
        judge = Check.broken if free < _TOO_LITTLE_SHARED else Check.warning
        yield judge("Memory", name, f"{result}; NCCL, Ray and DataLoader workers share memory there", remedy)


def may_lock_memory(users: Path = Path("/proc/self/uid_map")) -> bool:
    """Whether this process may lock any amount of memory: it has CAP_IPC_LOCK, as root usually does.

    The kernel asks for that of the machine's own user namespace. Root in a rootless container has it of another one.
    """
    held = int(processes.read_status("self").get("CapEff", "0"), 16)
    try:
        is_machines_own = users.read_text().split() == ["0", "0", str(2**32 - 1)]
    except OSError:
        is_machines_own = True
    return is_machines_own and bool(held >> _CAP_IPC_LOCK & 1)


def check_limits(
    read: ReadLimit = resource.getrlimit, may_lock: Callable[[], bool] = may_lock_memory
) -> Iterator[Check]:
    """The limits of processes (`ulimit`)."""
    rows = (
        ("locked memory", resource.RLIMIT_MEMLOCK, _LEAST_LOCKED, "NVMe offload locks buffers", "ulimit -l unlimited"),
        ("open files", resource.RLIMIT_NOFILE, _LEAST_FILES, "Ray and data loaders open many", "ulimit -n 65536"),
        ("processes", resource.RLIMIT_NPROC, 1024, "each thread of a rank counts", "ulimit -u unlimited"),
    )  # fmt: skip
    for name, number, least, why, remedy in rows:
        most = read(number)[0]
        if most == resource.RLIM_INFINITY or most >= least or (number == resource.RLIMIT_MEMLOCK and may_lock()):
            continue
        size = format_bytes(most) if number == resource.RLIMIT_MEMLOCK else f"{most:,}"
        yield Check.warning("Limits", name, f"{size}; {why}", remedy)
    data = read(resource.RLIMIT_DATA)[1]
    if data != resource.RLIM_INFINITY:
        result = f"a process may hold {format_bytes(data)} (ulimit -Hd)"
        yield Check.warning("Limits", "memory of a process", result, "ulimit -d unlimited")


def check_folders(folders: Mapping[str, Path]) -> Iterator[Check]:
    """Free space of the folders that a fit writes to, by what they are for."""
    for name, folder in folders.items():
        existing = find_existing(folder)
        free = shutil.disk_usage(existing).free
        if not os.access(existing, os.W_OK | os.X_OK):
            result, remedy = f"{folder} cannot be written", f"make {existing} writable"
            yield Check.broken("Disk", name, result, remedy)
        elif free < _LEAST_FREE:
            result = f"{folder}: {format_bytes(free)} free; checkpoints and built ops need more"
            yield Check.warning("Disk", name, result, "make room, or name another folder")
        else:
            yield Check.ok("Disk", name, f"{folder}: {format_bytes(free)} free")


def check_environment(variables: Mapping[str, str]) -> Iterator[Check]:
    """Variables that slow training down."""
    slow = [
        Check.warning("Settings", f"{name}={variables[name]}", effect, f"unset {name}")
        for name, (is_slow, effect) in _SLOW.items()
        if is_slow(variables.get(name, ""))
    ]
    yield from slow
    if not slow:
        yield Check.ok("Settings", "environment", "no variable of NCCL, CUDA or torch slows training down")


def check_kernel(version: Callable[[], int] = landlock.find_version) -> Iterator[Check]:
    """What the kernel offers: Landlock, and ports on loopback."""
    if version() >= 2:
        yield Check.ok("Settings", "Landlock", f"version {version()}: scripts in trials cannot write to your files")
    else:
        result = "not there: what C libraries and programs of a script write in a trial is real"
        yield Check.warning("Settings", "Landlock", result, "Linux 5.19 or later has it")
    try:
        socket.create_server(("127.0.0.1", 0)).close()
    except OSError as error:
        yield Check.broken("Settings", "ports on loopback", f"cannot be opened: {error.strerror}", "ip link set lo up")


def check_names(resolve: Callable[[str, None], object] = socket.getaddrinfo) -> Iterator[Check]:
    """Whether localhost and this host's own name have addresses: torchrun, gloo and MPI connect to them."""
    lost = []
    for name in dict.fromkeys(("localhost", socket.gethostname())):
        try:
            resolve(name, None)
        except OSError:
            lost.append(name)
    if lost:
        result = f"{' and '.join(lost)} has no address, so torchrun waits for it in vain"
        yield Check.warning("Settings", "host names", result, f'echo "127.0.0.1 {" ".join(lost)}" >> /etc/hosts')
    else:
        yield Check.ok("Settings", "host names", "localhost and this host have addresses")
