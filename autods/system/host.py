"""This machine: memory, control groups, processors, versions, and where autods keeps its data."""

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

_NONE = 2**60  # version 1 says "no limit" by a number near 2^63


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGroup:
    """One memory cgroup. Files are read anew at each call."""

    folder: Path
    version: int

    def limit_bytes(self) -> int | None:
        """What its processes may hold together; None when nothing limits them."""
        limit = _number(self.folder / ("memory.max" if self.version == 2 else "memory.limit_in_bytes"))
        return limit if limit is not None and limit < _NONE else None

    def free_bytes(self) -> int | None:
        """What is left of the limit; file pages that can be dropped at once count as free."""
        limit = self.limit_bytes()
        used = _number(self.folder / ("memory.current" if self.version == 2 else "memory.usage_in_bytes"))
        if limit is None or used is None:
            return None
        cached = _field(self.folder / "memory.stat", "inactive_file" if self.version == 2 else "total_inactive_file")
        return max(0, limit - used + (cached or 0))

    def oom_kills(self) -> int | None:
        """Processes that the killer has ended in it so far; with version 2 in the groups below it too."""
        return _field(self.folder / ("memory.events" if self.version == 2 else "memory.oom_control"), "oom_kill")


def find_memory_groups(
    of: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> tuple[MemoryGroup, ...]:
    """The group that limits this process and those above it, innermost first; none where there is no such cgroup."""
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
    """Processes that any OOM killer of this kernel has ended since it started."""
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
    found = next((words[1] for line in lines if (words := line.split()) and words[0] == name and len(words) == 2), None)
    return int(found) if found is not None and found.isdigit() else None


def threads_per_rank(ranks: int) -> int:
    """Threads of each of so many ranks on this node. Processors that share a core count once, as for torch itself."""
    usable = len(os.sched_getaffinity(0))
    cores = psutil.cpu_count(logical=False) or usable
    return max(1, min(usable, cores) // ranks)


def requested_threads() -> int | None:
    """What OMP_NUM_THREADS asks for; None where it is not set, or is no number, which OpenMP ignores as well."""
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(said) if said.isdigit() and int(said) > 0 else None


def data_folder(name: str) -> Path:
    """`strategies` or `configs`: inside the installed package, else beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise InputError(f"the folder {name}/ is missing from the installation", hint="reinstall autods")


def cache_folder() -> Path:
    """AUTODS_CACHE, or `autods` in the user's cache folder. It need not exist."""
    root = os.environ.get("AUTODS_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "autods")
    return Path(root).expanduser()


_VERSION = re.compile(r"^(__version__|cuda|hip)\b[^=\n]*= *'([^'\n]*)'", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One node, as seen by the driver.

    driver, cuda: the GPU driver's version and the newest CUDA that it runs. unusable: why the cards that there may be
    cannot be used, with the command that mends it. process_bytes: the private memory that one process may hold, where
    `ulimit -Hd` bounds it.
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
    """Of a node: what programs may hold together, and what is left of it."""

    total_bytes: int
    free_bytes: int


def read_hardware() -> Hardware:
    """Host memory by psutil and the cgroup's limit, cards by NVML; CUDA_VISIBLE_DEVICES is honoured."""
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
    """The machine's, or less where one of the cgroups that hold this process, a container's say, has a limit."""
    memory = psutil.virtual_memory()
    limits = [limit for group in groups if (limit := group.limit_bytes()) is not None]
    free = [left for group in groups if (left := group.free_bytes()) is not None]
    return HostMemory(total_bytes=min([memory.total, *limits]), free_bytes=min([memory.available, *free]))


def find_interface(address: str) -> str | None:
    """The name of this machine's network interface that has this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    return None


def visible_cards(visible: str | None) -> tuple[Card, ...]:
    """The cards that CUDA_VISIBLE_DEVICES leaves, see `gpus.read_nvml`."""
    return read_nvml(visible).cards


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """Which CUDA an installed torch was built with, (13, 0) say; None: with none."""

    version: str
    cuda: tuple[int, int] | None


def torch_build(folder: Path | None = None) -> TorchBuild | None:
    """Read from torch's version.py: importing it takes seconds. None where there is no such file."""
    if folder is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        folder = Path(spec.origin).parent
    try:
        text = (folder / "version.py").read_text()
    except OSError:
        return None
    said = {name: value for name, value in _VERSION.findall(text) if value}
    if "__version__" not in said or "hip" in said:  # ROCm's has no CUDA and needs none
        return None
    major, _, minor = said.get("cuda", "").partition(".")
    cuda = (int(major), int(minor or 0)) if major.isdigit() else None
    return TorchBuild(version=said["__version__"], cuda=cuda)


def _unusable(seen: NvmlReading, torch: TorchBuild | None) -> str | None:
    """Within a major version of CUDA each driver runs all minor ones."""
    if seen.problem is not None:
        return (
            f"{seen.problem}\n  see what nvidia-smi says; after an update of the driver the machine has to be restarted"
        )
    if not seen.cards or torch is None:
        return None
    if torch.cuda is None:
        return f"torch {torch.version} is built without CUDA\n  install a CUDA build of torch: pytorch.org/get-started"
    if seen.cuda is not None and torch.cuda[0] > seen.cuda[0]:
        needs, runs = (".".join(map(str, one)) for one in (torch.cuda, seen.cuda))
        return (
            f"torch {torch.version} needs CUDA {needs}, and the driver {seen.driver} runs {runs} at most\n"
            f"  update the driver, or install a build of torch for CUDA {seen.cuda[0]}"
        )
    return None


def installed_versions() -> dict[str, str]:
    """Versions of what decides the result."""
    found = {"python": platform.python_version()}
    for name in ("autods", "torch", "deepspeed", "ray", "optuna", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(
                (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
            )
    except OSError:
        return platform.machine()
