"""What this machine has: cards, their memory, host memory. Nothing here initialises CUDA."""

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

from .cards import Card as Card
from .cards import Seen, see
from .cgroup import MemoryGroup, memory_groups

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


def look() -> Hardware:
    """Host memory by psutil and the cgroup's limit, cards by NVML; CUDA_VISIBLE_DEVICES is honoured."""
    memory = host_memory(memory_groups())
    seen = see(os.environ.get("CUDA_VISIBLE_DEVICES"))
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


def host_memory(groups: Sequence[MemoryGroup]) -> HostMemory:
    """The machine's, or less where one of the cgroups that hold this process, a container's say, has a limit."""
    memory = psutil.virtual_memory()
    limits = [limit for group in groups if (limit := group.limit_bytes()) is not None]
    free = [left for group in groups if (left := group.free_bytes()) is not None]
    return HostMemory(total_bytes=min([memory.total, *limits]), free_bytes=min([memory.available, *free]))


def interface_of(address: str) -> str | None:
    """The name of this machine's network interface that has this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    return None


def visible_cards(visible: str | None) -> tuple[Card, ...]:
    """The cards that CUDA_VISIBLE_DEVICES leaves, see `cards.see`."""
    return see(visible).cards


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


def _unusable(seen: Seen, torch: TorchBuild | None) -> str | None:
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


def versions() -> dict[str, str]:
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
