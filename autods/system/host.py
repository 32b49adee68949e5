"""This machine: memory, control groups, processors, versions, and the folders of autods."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from ..errors import InputError
from .gpus import Card, NvmlReading, read_nvml

_NO_LIMIT = 2**60  # version 1 has a number near 2^63 where there is no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGroup:
    """One memory cgroup, of version 1 or 2. Its files are read at each call."""

    folder: Path
    version: int

    def limit_bytes(self) -> int | None:
        """Return the limit of its processes together; None where there is none."""
        limit = _number(self.folder / ("memory.max" if self.version == 2 else "memory.limit_in_bytes"))
        return limit if limit is not None and limit < _NO_LIMIT else None

    def free_bytes(self) -> int | None:
        """Return the bytes left of the limit; droppable file pages count as free."""
        limit = self.limit_bytes()
        used = _number(self.folder / ("memory.current" if self.version == 2 else "memory.usage_in_bytes"))
        if limit is None or used is None:
            return None
        cached = _field(self.folder / "memory.stat", "inactive_file" if self.version == 2 else "total_inactive_file")
        return max(0, limit - used + (cached or 0))

    def oom_kills(self) -> int | None:
        """Return how many of its processes the OOM killer has ended; version 2 counts the groups below as well."""
        return _field(self.folder / ("memory.events" if self.version == 2 else "memory.oom_control"), "oom_kill")


def find_memory_groups(
    of: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> tuple[MemoryGroup, ...]:
    """Return the cgroups that limit the memory of this process, innermost first."""
    try:
        lines = of.read_text().splitlines()
    except OSError:
        return ()
    paths = dict(_controllers(line) for line in lines if line.count(":") >= 2)
    if "memory" in paths:
        return _up(mount / "memory", paths["memory"], "memory.limit_in_bytes", version=1)
    if "" in paths:
        return _up(mount, paths[""], "memory.max", version=2)
    return ()


def machine_oom_kills() -> int | None:
    """Return how many processes the OOM killers of this kernel have ended since it started."""
    return _field(Path("/proc/vmstat"), "oom_kill")


def _controllers(line: str) -> tuple[str, str]:
    """'4:memory:/a/b' → ('memory', '/a/b'); '0::/a' → ('', '/a')."""
    _, names, path = line.split(":", 2)
    return ("memory" if "memory" in names.split(",") else names), path


def _up(mount: Path, path: str, file: str, *, version: int) -> tuple[MemoryGroup, ...]:
    inner = mount / path.lstrip("/")
    # In a container the path can be the host's, while what is mounted is the container's own group.
    if not (inner / file).exists():
        inner = mount
    folders = [inner, *(folder for folder in inner.parents if folder == mount or mount in folder.parents)]
    return tuple(MemoryGroup(folder=folder, version=version) for folder in folders if (folder / file).exists())


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _field(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    rows = (line.split() for line in lines)
    value = next((row[1] for row in rows if len(row) == 2 and row[0] == name), "")
    return int(value) if value.isdigit() else None


def threads_per_rank(ranks: int) -> int:
    """Return the threads of a rank when so many share this node. Hyper-threads of a core count once, as in torch."""
    usable = len(os.sched_getaffinity(0))
    cores = psutil.cpu_count(logical=False) or usable
    return max(1, min(usable, cores) // ranks)


def requested_threads() -> int | None:
    """Return the number in OMP_NUM_THREADS; None where it is not set or not a number, which OpenMP ignores too."""
    value = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(value) if value.isdigit() and int(value) > 0 else None


def data_folder(name: str) -> Path:
    """Return the folder `strategies` or `configs`: inside the installed package, else beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise InputError(f"the folder {name}/ is missing from the installation", hint="reinstall autods")


def cache_folder() -> Path:
    """Return AUTODS_CACHE, or `autods` in the user's cache folder. It need not exist."""
    root = os.environ.get("AUTODS_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "autods")
    return Path(root).expanduser()


_VERSION = re.compile(r"^(__version__|cuda|hip)\b[^=\n]*= *'([^'\n]*)'", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One node.

    `driver` is the version of the GPU driver, `cuda` the newest CUDA that it runs. `unusable` says why the cards cannot
    be used, with the command that fixes it. `process_bytes` is the private memory of one process, if `ulimit -Hd`
    limits it.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Host memory of a node: what programs may use together, and what is free of it."""

    total_bytes: int
    free_bytes: int


def read_hardware() -> Hardware:
    """Read this node: memory from psutil and cgroups, cards from NVML. CUDA_VISIBLE_DEVICES is honoured."""
    memory = read_host_memory(find_memory_groups())
    seen = read_nvml(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return Hardware(
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        host_bytes=memory.total_bytes,
        host_free_bytes=memory.free_bytes,
        cards=seen.cards,
        driver=seen.driver,
        cuda=None if seen.cuda is None else ".".join(map(str, seen.cuda)),
        unusable=_unusable(seen, torch_build()),
        process_bytes=_process_bytes(),
    )


def _process_bytes() -> int | None:
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def read_host_memory(groups: Sequence[MemoryGroup]) -> HostMemory:
    """Return the memory of the machine, or less where a cgroup of this process, such as a container's, has a limit."""
    memory = psutil.virtual_memory()
    limits = [limit for group in groups if (limit := group.limit_bytes()) is not None]
    free = [left for group in groups if (left := group.free_bytes()) is not None]
    return HostMemory(total_bytes=min([memory.total, *limits]), free_bytes=min([memory.available, *free]))


def find_interface(address: str) -> str | None:
    """Return the name of the network interface with this address; None where this machine has none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address.partition("%")[0] == address for known in addresses):
            return name
    return None


def visible_cards(visible: str | None) -> tuple[Card, ...]:
    """Return the cards that CUDA_VISIBLE_DEVICES (`visible`) shows, see `gpus.read_nvml`."""
    return read_nvml(visible).cards


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """The installed torch. `cuda` is the CUDA that it was built with, such as (13, 0); None without CUDA."""

    version: str
    cuda: tuple[int, int] | None


def torch_build(folder: Path | None = None) -> TorchBuild | None:
    """Read torch's version.py, because importing torch takes seconds. None where there is no such file."""
    if folder is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        folder = Path(spec.origin).parent
    try:
        text = (folder / "version.py").read_text()
    except OSError:
        return None
    values = {name: value for name, value in _VERSION.findall(text) if value}
    if "__version__" not in values or "hip" in values:  # a ROCm build needs no CUDA
        return None
    major, _, minor = values.get("cuda", "").partition(".")
    cuda = (int(major), int(minor or 0)) if major.isdigit() else None
    return TorchBuild(version=values["__version__"], cuda=cuda)


def _unusable(seen: NvmlReading, torch: TorchBuild | None) -> str | None:
    """Return why torch cannot use the cards. A driver runs all minor versions of its major version of CUDA."""
    if seen.problem is not None:
        return (
            f"{seen.problem}\n  see what nvidia-smi says; after an update of the driver the machine has to be restarted"
        )
    if not seen.cards or torch is None:
        return None
    if torch.cuda is None:
        return f"torch {torch.version} is built without CUDA\n  install a CUDA build of torch: pytorch.org/get-started"
    if seen.cuda is not None and torch.cuda[0] > seen.cuda[0]:
        needs, runs = (".".join(map(str, version)) for version in (torch.cuda, seen.cuda))
        return (
            f"torch {torch.version} needs CUDA {needs}, and the driver {seen.driver} runs {runs} at most\n"
            f"  update the driver, or install a build of torch for CUDA {seen.cuda[0]}"
        )
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


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(
                (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
            )
    except OSError:
        return platform.machine()
