"""This machine: memory, control groups, processors, versions, and the folders of autods."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import resource
import shutil
import socket
import stat
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from ..devices import Card, find_memory_nodes, read_cards
from ..devices.cpu import read_processor_field
from ..errors import EnvironmentBroken, InputError

_NO_LIMIT = 2**60  # version 1 has a number near 2^63 where there is no limit


# By version: the file of the limit, the file of the used bytes, the file of OOM kills.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control"),
    2: ("memory.max", "memory.current", "memory.events"),
}
# Fields of memory.stat: what the kernel drops before it kills. It is the cache of files, read once (inactive) or often
# (active), and of their names.
_DROPPABLE = {
    1: ("total_inactive_file", "total_active_file"),
    2: ("inactive_file", "active_file", "slab_reclaimable"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGroup:
    """One memory cgroup, of version 1 or 2. Its files are read at each call."""

    folder: Path
    version: int

    def limit_bytes(self) -> int | None:
        """Return the limit of its processes together; None where there is none.

        Above memory.high of version 2 nothing is killed, but the kernel makes each allocation wait, so that a rank
        stands still. systemd (MemoryHigh), Slurm and Kubernetes set it.
        """
        names = (_FILES[self.version][0], *(("memory.high",) if self.version == 2 else ()))
        limits = (_read_number(self.folder / name) for name in names)
        return min((limit for limit in limits if limit is not None and limit < _NO_LIMIT), default=None)

    def free_bytes(self) -> int | None:
        """Return the bytes left of the limit; what the kernel can drop counts as free, the cache of files above all."""
        limit, used = self.limit_bytes(), _read_number(self.folder / _FILES[self.version][1])
        if limit is None or used is None:
            return None
        droppable = sum(_read_number(self.folder / "memory.stat", name) or 0 for name in _DROPPABLE[self.version])
        return max(0, limit - used + droppable)

    def oom_kills(self) -> int | None:
        """Return how many of its processes the OOM killer has ended; version 2 counts the groups below as well."""
        return _read_number(self.folder / _FILES[self.version][2], "oom_kill")


_CGROUPS, _CGROUP_MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def find_memory_groups(of: Path = _CGROUPS, mount: Path = _CGROUP_MOUNT) -> tuple[MemoryGroup, ...]:
    """Return the cgroups that limit the memory of this process, innermost first."""
    version, folders = _find_groups("memory", of, mount)
    groups = (MemoryGroup(folder=folder, version=version) for folder in folders)
    return tuple(group for group in groups if (group.folder / _FILES[version][0]).exists())


def read_cpu_quota(of: Path = _CGROUPS, mount: Path = _CGROUP_MOUNT) -> float | None:
    """Return how many processors' time this process and its group may use; None without a limit.

    Containers have such a limit (`docker --cpus`, Kubernetes' limits). They still show all processors of the machine.
    """
    version, folders = _find_groups("cpu", of, mount)
    quotas = []
    for folder in folders:
        files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        with contextlib.suppress(OSError):
            words = " ".join((folder / file).read_text() for file in files).split()  # quota and period, in µs
            if len(words) == 2 and all(word.isdigit() for word in words):  # else 'max', or -1 in version 1
                quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def find_pids_left(of: Path = _CGROUPS, mount: Path = _CGROUP_MOUNT) -> int | None:
    """Return how many more threads the cgroups of this process allow; None without a limit."""
    _, folders = _find_groups("pids", of, mount)
    pairs = ((_read_number(folder / "pids.max"), _read_number(folder / "pids.current")) for folder in folders)
    return min((most - now for most, now in pairs if most is not None and now is not None), default=None)


def _find_groups(controller: str, of: Path, mount: Path) -> tuple[int, list[Path]]:
    """Return the version of this process's cgroups of the controller, and their folders, innermost first."""
    try:
        lines = [line.split(":", 2) for line in of.read_text().splitlines()]  # '4:cpu,cpuacct:/a/b' or '0::/a'
    except OSError:
        return 2, []
    paths = {name: line[2] for line in lines if len(line) == 3 for name in line[1].split(",")}
    if controller in paths:
        version, path, mount = 1, paths[controller], mount / controller
    elif "" in paths:
        version, path = 2, paths[""]
    else:
        return 2, []
    inner = mount / path.lstrip("/")
    # In a container the path can be the host's, while what is mounted is the container's own group.
    if not inner.is_dir():
        inner = mount
    return version, [inner, *(folder for folder in inner.parents if folder.is_relative_to(mount))]


def machine_oom_kills() -> int | None:
    """Return how many processes the OOM killers of this kernel have ended since it started."""
    return _read_number(Path("/proc/vmstat"), "oom_kill")


def _read_number(path: Path, name: str | None = None) -> int | None:
    """Return the number that the file holds, or that of its line 'NAME NUMBER'; None where there is none."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return None
    wanted = [] if name is None else [name]
    value = next((line[-1] for line in lines if line[:-1] == wanted), "")
    return int(value) if value.isdigit() else None


_DEVICES = Path("/sys/devices/system")
Core = tuple[int, ...]  # the processors of a core: hyper-threads


def count_cores(devices: Path = _DEVICES) -> int:
    """Return the cores that ranks can share here: within the affinity and the CPU quota of this process.

    Hyper-threads of a core count once, as in torch; a job of Slurm often gets both threads of a part of the cores.
    """
    usable = os.sched_getaffinity(0)
    count = len({_read_core(cpu, usable, devices) for cpu in usable})
    cores, quota = psutil.cpu_count(logical=False), read_cpu_quota()
    return max(1, min(count, cores or count, count if quota is None else int(quota)))


def _read_core(cpu: int, usable: Set[int], devices: Path) -> Core:
    """Return the usable processors of a processor's core; itself alone where the kernel does not tell."""
    try:
        siblings = _parse_cpus((devices / f"cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
    except OSError:
        siblings = [cpu]
    return tuple(each for each in siblings if each in usable)


def threads_per_rank(ranks: int, cores: int) -> int:
    """Return the threads of a rank when so many share the cores of a node."""
    return max(1, cores // ranks)


def read_numa_cores(devices: Path = _DEVICES) -> dict[int, list[Core]]:
    """Return the cores of each NUMA node that this process may use. Empty where a quota leaves it fewer than all."""
    usable = os.sched_getaffinity(0)
    nodes: dict[int, list[Core]] = {}
    with contextlib.suppress(OSError, ValueError):
        for folder in sorted(devices.glob("node/node[0-9]*"), key=lambda path: int(path.name[4:])):
            cpus = (cpu for cpu in _parse_cpus((folder / "cpulist").read_text()) if cpu in usable)
            if cores := dict.fromkeys(_read_core(cpu, usable, devices) for cpu in cpus):
                nodes[int(folder.name[4:])] = list(cores)
    quota, count = read_cpu_quota(), sum(map(len, nodes.values()))
    return {} if quota is not None and quota < count else nodes


def _parse_cpus(text: str) -> list[int]:
    """'0-2,8' → [0, 1, 2, 8]."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return [cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)]


def share_cores(nodes: Mapping[int, Sequence[Core]], rank_nodes: Sequence[int | None]) -> tuple[Core, ...]:
    """Return the processors of each rank of a node: an even share of its cores, in the order of NUMA nodes.

    `rank_nodes` has the NUMA node of each rank's card. Where cards are spread evenly, ranks get cores beside them;
    otherwise each keeps its own memory near. Empty where binding gains nothing: one rank or NUMA node, too few cores.
    """
    cores = [core for node in sorted(nodes) for core in nodes[node]]
    ranks = len(rank_nodes)
    if ranks < 2 or len(nodes) < 2 or len(cores) < ranks:
        return ()
    each = len(cores) // ranks
    order = sorted(range(ranks), key=lambda slot: (rank_nodes[slot] is None, rank_nodes[slot] or 0, slot))
    shares = {slot: cores[place * each : (place + 1) * each] for place, slot in enumerate(order)}
    return tuple(tuple(cpu for core in shares[slot] for cpu in core) for slot in range(ranks))


def requested_threads() -> int | None:
    """Return the number in OMP_NUM_THREADS; None where it is not set or not a number, which OpenMP ignores too."""
    value = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(value) if value.isdigit() and int(value) > 0 else None


def data_folder(name: str) -> Path:
    """Return `strategies`, `configs` or `examples`: inside the installed package, else beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise InputError(f"the folder {name}/ is missing from the installation", hint="reinstall autods")


def cache_folder() -> Path:
    """Return AUTODS_CACHE, or `autods` in the user's cache folder; one in /tmp where there is no home to write into.

    AUTODS_CACHE need not exist. The others do. Raises EnvironmentBroken where /tmp has another user's in its place.
    """
    if given := os.environ.get("AUTODS_CACHE"):
        return Path(given).absolute()
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: the user has no home
        folder = Path(root).expanduser() / "autods"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    folder = Path("/tmp") / f"autods-cache-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise EnvironmentBroken(f"{folder}: others may write it\n  set AUTODS_CACHE to a folder of your own")
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One node.

    `cores` are those that ranks can share, see `count_cores`. `driver` is the version of the GPU driver, `cuda` the
    newest CUDA that it runs. `unusable` says why the cards cannot be used, with the command that fixes it.
    `process_bytes` is the private memory of one process, if `ulimit -Hd` limits it. `numa_nodes` counts those whose
    cores ranks can be bound to; launchers need the program `numactl` for it.
    """

    cpu: str
    cores: int
    host_bytes: int
    host_free_bytes: int
    cards: tuple[Card, ...]
    driver: str | None = None
    cuda: str | None = None
    unusable: str | None = None
    process_bytes: int | None = None
    numa_nodes: int = 1
    numactl: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Host memory of a node: what programs may use together, and what is free of it."""

    total_bytes: int
    free_bytes: int


def read_hardware() -> Hardware:
    """Read this node: memory from psutil and cgroups, cards from their driver. CUDA_VISIBLE_DEVICES is honoured."""
    memory = read_host_memory(find_memory_groups())
    seen = read_cards()
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    return Hardware(
        cpu=read_processor_field("model name") or platform.machine(),
        cores=count_cores(),
        host_bytes=memory.total_bytes,
        host_free_bytes=memory.free_bytes,
        cards=seen.cards,
        driver=seen.driver,
        cuda=seen.cuda,
        unusable=seen.unusable,
        process_bytes=None if most == resource.RLIM_INFINITY else most,
        numa_nodes=max(1, len(read_numa_cores())),
        numactl=shutil.which("numactl") is not None,
    )


_MEMINFO = Path("/proc/meminfo")


def read_host_memory(
    groups: Sequence[MemoryGroup], meminfo: Path = _MEMINFO, card_nodes: Sequence[Path] | None = None
) -> HostMemory:
    """Return the memory of the machine, or less where a cgroup of this process, such as a container's, has a limit.

    Pages that are reserved as huge ones, and `card_nodes`, see `find_card_nodes`, are no memory for programs.
    """
    memory = psutil.virtual_memory()
    nodes = [read_meminfo(node / "meminfo") for node in (find_card_nodes() if card_nodes is None else card_nodes)]
    total = memory.total - read_meminfo(meminfo).get("Hugetlb", 0) - sum(node.get("MemTotal", 0) for node in nodes)
    available = max(0, memory.available - sum(node.get("MemFree", 0) for node in nodes))
    limits = [limit for group in groups if (limit := group.limit_bytes()) is not None]
    free = [left for group in groups if (left := group.free_bytes()) is not None]
    return HostMemory(total_bytes=min([total, *limits]), free_bytes=min([available, *free]))


@functools.cache
def find_card_nodes(
    devices: Path = _DEVICES, find: Callable[[], frozenset[int]] = find_memory_nodes
) -> tuple[Path, ...]:
    """Return the folders of the NUMA nodes that are memory of cards; the driver of GH200 and GB200 makes such.

    They have no processors. Where a container shows a part of the cards, the nodes of the others are there as well.
    """
    folders = {int(folder.name[4:]): folder for folder in devices.glob("node/node[0-9]*")}
    bare = {node: folder for node, folder in folders.items() if not _has_processors(folder)}
    bare = {node: folder for node, folder in bare.items() if read_meminfo(folder / "meminfo").get("MemTotal")}
    return tuple(bare.values()) if bare and not bare.keys().isdisjoint(find()) else ()


def _has_processors(node: Path) -> bool:
    try:
        return bool((node / "cpulist").read_text().strip())
    except OSError:
        return True


def read_meminfo(path: Path) -> dict[str, int]:
    """Return the sizes in /proc/meminfo, or in that of a NUMA node ('Node 1 MemFree: 8 kB'), in bytes by name."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[-3].rstrip(":"): int(line[-2]) * 1024 for line in lines if line[-1:] == ["kB"] and len(line) > 2}


def find_interface(address: str) -> str | None:
    """Return the name of the network interface with this address or host name; None where this machine has none."""
    try:  # FD00:0::1 is fd00::1
        same = {str(place[0]).partition("%")[0] for *_, place in socket.getaddrinfo(address, None)}
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address.partition("%")[0] in same for known in addresses):
            return name
    return None


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages that decide the result."""
    versions = {"python": platform.python_version()}
    for name in ("autods", "torch", "deepspeed", "ray", "optuna", "transformers"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions
