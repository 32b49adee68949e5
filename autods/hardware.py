"""What this machine has: cards, their memory, host memory. Nothing here initialises CUDA."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata

import psutil

from .cgroup import MemoryGroup, memory_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One visible GPU. `index` is NVML's."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One node, as seen by the driver."""

    cpu: str
    cores: int
    host_bytes: int
    host_free_bytes: int
    cards: tuple[Card, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Of a node: what programs may hold together, and what is left of it."""

    total_bytes: int
    free_bytes: int


def look() -> Hardware:
    """Host memory by psutil and the cgroup's limit, cards by NVML; CUDA_VISIBLE_DEVICES is honoured."""
    memory = host_memory(memory_groups())
    return Hardware(
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        host_bytes=memory.total_bytes,
        host_free_bytes=memory.free_bytes,
        cards=visible_cards(os.environ.get("CUDA_VISIBLE_DEVICES")),
    )


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
    """The cards that CUDA_VISIBLE_DEVICES leaves, in its order; all when it is None, none when NVML has no driver.

    As for CUDA, the first name that no card has ends the list.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        names = map(str, range(pynvml.nvmlDeviceGetCount())) if visible is None else visible.split(",")
        return tuple(_card(handle) for handle in _handles(names))
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def versions() -> dict[str, str]:
    """Versions of what decides the result."""
    found = {"python": platform.python_version()}
    for name in ("autods", "torch", "deepspeed", "ray", "optuna", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _handles(names: Iterable[str]) -> Iterator[object]:
    import pynvml

    for name in (part.strip() for part in names):
        find = pynvml.nvmlDeviceGetHandleByIndex if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID
        try:
            yield find(int(name) if name.isdigit() else name)
        except pynvml.NVMLError:
            return


def _card(handle: object) -> Card:
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Card(
        index=pynvml.nvmlDeviceGetIndex(handle),
        name=str(pynvml.nvmlDeviceGetName(handle)),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
    )


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(
                (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
            )
    except OSError:
        return platform.machine()
