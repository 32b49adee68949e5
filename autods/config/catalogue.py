"""The catalogue of machines: common GPUs and their nodes, one file a machine in `configs/hardware/*.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError
from ..schema import read_checked, read_toml
from ..system.host import data_folder

ASKED, HERE = "asked", "here"  # machines outside the catalogue: one described by options, and this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links between GPUs and to the host, and their speed in GB/s."""

    between_gpus: str
    between_gpus_gb_per_s: float
    to_host: str
    to_host_gb_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The target of a forecast: one rank's device, and the node that holds it.

    `device_bytes` is the memory that the driver leaves to programs. `gpus`, `host_bytes` and `nvme_bytes` count for
    the whole node. They are None where they are unknown, `nvme_bytes` also where the node has no NVMe.
    """

    name: str
    title: str
    device_bytes: int
    gpus: int | None = None
    bf16: bool = True
    host_bytes: int | None = None
    nvme_bytes: int | None = None
    links: Links | None = None
    source: str = "as asked"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    bytes: int
    bf16: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    gpus: int
    host_bytes: int
    nvme_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A machine as its TOML file has it."""

    name: str
    title: str
    source: str
    device: _Device
    node: _Node
    links: Links


def read_catalogue(folder: Path | None = None) -> Mapping[str, Machine]:
    """Return every machine by name, smallest device first. Raises InputError for a file that is not a machine."""
    paths = sorted((folder or data_folder("configs") / "hardware").glob("*.toml"))
    machines = [_read_machine(path) for path in paths]
    machines.sort(key=lambda machine: (machine.device_bytes, machine.host_bytes or 0, machine.name))
    return {machine.name: machine for machine in machines}


def find_machines(names: str) -> tuple[Machine, ...]:
    """Return the machines named by 'a100-80gb,h100-80gb', 'all' or the path of a .toml file, smallest device first."""
    known = read_catalogue()
    wanted = list(known) if names.strip() == "all" else [name.strip() for name in names.split(",")]
    machines = {machine.name: machine for machine in (_find_machine(name, known) for name in wanted)}
    return tuple(sorted(machines.values(), key=lambda machine: machine.device_bytes))


def _find_machine(name: str, known: Mapping[str, Machine]) -> Machine:
    if name.endswith(".toml"):
        return _read_machine(Path(name))
    machine = known.get(name.lower())
    if machine is None:
        raise InputError(f"--on {name}: the catalogue has no such machine", hint=f"give all, or of: {', '.join(known)}")
    return machine


def _read_machine(path: Path) -> Machine:
    hint = "compare with configs/hardware/a100-80gb.toml"
    file = read_checked(_File, read_toml(path), _check, name="machine", place=str(path), hint=hint)
    return Machine(
        name=file.name,
        title=file.title,
        device_bytes=file.device.bytes,
        gpus=file.node.gpus,
        bf16=file.device.bf16,
        host_bytes=file.node.host_bytes,
        nvme_bytes=file.node.nvme_bytes,
        links=file.links,
        source=file.source,
    )


def _check(file: _File) -> None:
    """Raises ValueError for sizes that make no sense."""
    if min(file.device.bytes, file.node.gpus, file.node.host_bytes) <= 0:
        raise ValueError("bytes and gpus must be above 0")
