"""Machines: of the catalogue (`configs/hardware/*.toml`), described by options, or this one; and ranks on them."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..devices import Card
from ..errors import InputError
from ..files import as_folder_name
from ..schema import check_name, read_toml_as
from ..system.host import Hardware, cache_folder, data_folder
from ..types import MOST_RANKS

_CAPABILITY = re.compile(r"\d{1,2}\.\d")
ASKED, HERE = "asked", "here"  # machines outside the catalogue: one described by options, and this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links between GPUs, to the host and between nodes, and their speed in GB/s.

    The speed of the GPUs' own link counts both directions together, those of PCIe and of the network count one.
    The network's is that of a whole node. `over_pcie`: GPUs have no links of their own. `to_host_shared_by` cards share
    a link to the host, behind a PCIe switch.
    """

    over_pcie: bool
    between_gpus: str
    between_gpus_gb_per_s: float
    to_host: str
    to_host_gb_per_s: float
    to_host_shared_by: int = 1
    network: str | None = None
    network_gb_per_s: float | None = None

    @property
    def nvlink_gb_per_s(self) -> float | None:
        """The total of a GPU's own links, both directions; None where GPUs talk over PCIe."""
        return None if self.over_pcie else self.between_gpus_gb_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Tflops:
    """Dense matmul peaks by the operands' dtype, in TFLOP/s; None where the device has no such units."""

    fp32: float
    tf32: float | None = None
    fp16: float | None = None
    bf16: float | None = None
    fp8: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The peaks of one device by its maker's data sheet. `compute_capability` is NVIDIA's, such as "8.6".

    `matmul_share` is what large matmuls reach of the dense peak: power limits lower a card's clock under their load.
    `attention_share` is what flash attention reaches of it forward and backward, with causal attention counted as half.
    Where the card has none, it is the share of memory-efficient attention.
    """

    multiprocessors: int
    memory_gb_per_s: float
    tflops: Tflops
    source: str
    matmul_share: float = 0.75
    attention_share: float = 0.4
    compute_capability: str | None = None

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability as torch gives it, such as (8, 6)."""
        return None if self.compute_capability is None else parse_capability(self.compute_capability)


def parse_capability(text: str) -> tuple[int, int]:
    """Return a compute capability such as "8.6" as (8, 6). Raises ValueError."""
    if not _CAPABILITY.fullmatch(text):
        raise ValueError(f'the compute capability {text!r:.20} is not of the form "8.6"')
    major, minor = text.split(".")
    return int(major), int(minor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What `autods doctor --measure` found on a machine, in place of values of configs/forecast/step_time.toml.

    Names, units and meaning are those of `Efficiency`; None where a part was not measured.
    """

    fp32_matmul: float | None = None
    memory: float | None = None
    reduction: float | None = None
    nvlink: float | None = None
    pcie_between_gpus: float | None = None
    pinned_copy: float | None = None
    pageable_copy: float | None = None
    dram: float | None = None
    core_gb_per_s: float | None = None
    first_touch_gb_per_s: float | None = None
    host_optimizer: float | None = None
    nvme: float | None = None
    launch_us: float | None = None
    view_us: float | None = None
    first_step_us: float | None = None
    step_us: float | None = None

    @property
    def known(self) -> dict[str, float]:
        """The values that were measured, by name."""
        return {key.name: value for key in fields(self) if (value := getattr(self, key.name)) is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The target of a forecast: one rank's device, and the node that holds it.

    `device_bytes` is the memory that the driver leaves to programs. `gpus`, `host_bytes`, `nvme_bytes`,
    `dram_gb_per_s` and `nvme_gb_per_s` (sequential reads) count for the whole node, of all its `sockets`. They are
    None where they are unknown, those of NVMe also where the node has none. Ranks share the node's `cores` as
    threads; None: each of several ranks has one. `driver_names` are the card's names in NVML, and
    `driver_capability` is its compute capability as NVML has it, for a card without rates. `file` is the path of the
    user's file that describes it.
    """

    name: str
    title: str
    device_bytes: int
    gpus: int | None = None
    bf16: bool = True
    driver_names: tuple[str, ...] = ()
    driver_capability: tuple[int, int] | None = None
    host_bytes: int | None = None
    nvme_bytes: int | None = None
    dram_gb_per_s: float | None = None
    sockets: int = 1
    nvme_gb_per_s: float | None = None
    cores: int | None = None
    rates: Rates | None = None
    links: Links | None = None
    measured: Measured = Measured()
    source: str = "as asked"
    file: str | None = field(default=None, compare=False)

    @property
    def on(self) -> str:
        """What --on takes for it."""
        return self.file or self.name

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability of the card; None where it is unknown."""
        return self.driver_capability if self.rates is None else self.rates.capability

    @property
    def has_nvlink(self) -> bool | None:
        """Whether cards have links of their own; None where that is unknown."""
        return None if self.links is None else self.links.nvlink_gb_per_s is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Ranks on nodes of one machine, and the config that they train with.

    `base` is the user's DeepSpeed config, which trains in `precision`. `nvme_path` is a folder on NVMe; `lacks_nvme`
    says why there is none.
    `micro_batch` and `price_per_gpu_hour` are a plan's. `problem` says why nothing can run there, `wrong_stages` why
    the installed DeepSpeed must not train at some ZeRO stages.
    """

    machine: Machine
    world_size: int
    ranks_per_node: int
    device: str = "cuda"
    base: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "bf16"
    micro_batch: int = 1
    global_batch: int | None = None
    nvme_path: Path | None = None
    lacks_nvme: str = "no --nvme-path was given"
    price_per_gpu_hour: float | None = None
    problem: str | None = None
    wrong_stages: Mapping[int, str] = field(default_factory=dict)

    @property
    def nodes(self) -> int:
        return -(-self.world_size // self.ranks_per_node)


@functools.cache  # the files of an installation do not change while it runs
def read_catalogue() -> Mapping[str, Machine]:
    """Return every machine by name, smallest device first. Raises InputError for a file that is not a machine."""
    machines = [_read_machine(path) for path in (data_folder("configs") / "hardware").glob("*.toml")]
    machines.sort(key=lambda machine: (machine.device_bytes, machine.host_bytes or 0, machine.name))
    return {machine.name: machine for machine in machines}


def find_machines(names: str) -> tuple[Machine, ...]:
    """Return the machines named by 'a100-80gb,h100-80gb', 'all' or the path of a .toml file, smallest device first.

    Raises InputError for an unknown one, and for two different ones of the same name.
    """
    known = read_catalogue()
    machines: dict[str, Machine] = {}
    for name in known if names.strip() == "all" else (name.strip() for name in names.split(",")):
        is_file = name.endswith(".toml")
        machine = replace(_read_machine(Path(name)), file=name) if is_file else known.get(name.lower())
        if machine is None:
            hint = "give --on all, without other names" if name == "all" else _name_near(name, known)
            raise InputError(f"--on {names}: the catalogue has no machine {name!r}", hint=hint)
        if (other := machines.setdefault(machine.name, machine)) != machine:
            problem = f"--on {names}: {other.on} and {machine.on} are both named {machine.name!r}, and differ"
            raise InputError(problem, hint="give one another name in its file")
    return tuple(sorted(machines.values(), key=lambda machine: machine.device_bytes))


def _name_near(name: str, known: Iterable[str]) -> str:
    """'did you mean a100-40gb or a100-80gb?' for a100; all names for one that resembles none."""
    known = tuple(known)
    begun = [each for each in known if name and each.startswith(name.lower())]
    near = begun or get_close_matches(name.lower(), known)
    return f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(known)}"


def describe_this_machine(cards: Sequence[Card], hardware: Hardware, *, measured: bool = True) -> Machine:
    """Return the machine of the smallest of these cards, with rates and links of the catalogue if it has the card.

    `measured`: what was measured on it comes first. Without cards it is the processor, whose ranks stand in for GPUs.
    """
    if not cards:
        host_bytes, cores = hardware.host_bytes, hardware.cores
        return Machine(
            name=HERE, title=hardware.cpu, device_bytes=host_bytes, host_bytes=host_bytes, cores=cores, source="psutil"
        )
    card, bf16 = min(cards, key=lambda card: card.total_bytes), all(card.bf16 for card in cards)
    known = None
    if not card.slice and len({card.name for card in cards}) == 1:
        known = (find_measured(card.name, hardware) if measured else None) or find_by_driver_name(card.name)
    return Machine(
        name=HERE,
        title=card.name,
        device_bytes=card.total_bytes,
        gpus=len(cards),
        bf16=bf16,
        driver_capability=card.capability,
        host_bytes=hardware.host_bytes,
        dram_gb_per_s=None if known is None else known.dram_gb_per_s,
        sockets=1 if known is None else known.sockets,
        nvme_gb_per_s=None if known is None else known.nvme_gb_per_s,
        cores=hardware.cores,
        rates=None if known is None else known.rates,
        links=None if known is None else known.links,
        measured=Measured() if known is None else known.measured,
        source="NVML and psutil"
        if known is None
        else f"NVML and psutil; rates, links and host bandwidth: {known.name}",
    )


def make_hardware(machine: Machine, cards: int) -> Hardware:
    """Return a node of this machine as if it were here, with so many cards."""
    card = Card(
        index=0,
        name=machine.title,
        total_bytes=machine.device_bytes,
        free_bytes=machine.device_bytes,
        bf16=machine.bf16,
        capability=machine.capability,
    )
    host_bytes = machine.host_bytes or 0
    return Hardware(
        cpu=machine.title,
        cores=max(1, cards),
        host_bytes=host_bytes,
        host_free_bytes=host_bytes,
        cards=tuple(replace(card, index=index) for index in range(cards)),
    )


def find_by_driver_name(name: str) -> Machine | None:
    """Return the machine of the catalogue whose card NVML calls so. Old drivers leave out the maker."""
    short = name.removeprefix("NVIDIA ")
    machines = read_catalogue().values()
    return next(
        (known for known in machines if short in {each.removeprefix("NVIDIA ") for each in known.driver_names}), None
    )


def measured_path(card: str, hardware: Hardware) -> Path:
    """Return the file in the cache for what was measured on machines with this card, '' for none, and this processor.

    Machines that are alike share it, also where they share a home.
    """
    kind = f"{card or 'cpu'}, {hardware.cpu}, {hardware.cores} cores"
    digest = hashlib.sha256(kind.encode()).hexdigest()[:8]
    return cache_folder() / "machines" / f"{as_folder_name(card or hardware.cpu)}-{digest}.toml"


def find_measured(card: str, hardware: Hardware) -> Machine | None:
    """Return the machine as it was measured; None where it was not, or where another version wrote the file."""
    path = measured_path(card, hardware)
    try:
        return _read_machine(path) if path.exists() else None
    except InputError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceTable:
    bytes: int
    driver_names: tuple[str, ...] = ()
    bf16: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _NodeTable:
    gpus: int
    host_bytes: int
    nvme_bytes: int | None = None
    dram_gb_per_s: float | None = None
    sockets: int = 1
    nvme_gb_per_s: float | None = None
    cores: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _MachineFile:
    """A machine as its TOML file has it, so that what is wrong is named as it stands there."""

    name: str
    title: str
    device: _DeviceTable
    node: _NodeTable
    source: str = "as asked"
    rates: Rates | None = None
    links: Links | None = None
    measured: Measured = Measured()

    @property
    def machine(self) -> Machine:
        return Machine(
            device_bytes=self.device.bytes,
            **_take_fields(_DeviceTable, self.device, without=("bytes",)),
            **_take_fields(_NodeTable, self.node),
            **_take_fields(_MachineFile, self, without=("device", "node")),
        )


def _make_file(machine: Machine) -> _MachineFile:
    return _MachineFile(
        device=_DeviceTable(bytes=machine.device_bytes, **_take_fields(_DeviceTable, machine, without=("bytes",))),
        node=_NodeTable(**_take_fields(_NodeTable, machine)),
        **_take_fields(_MachineFile, machine, without=("device", "node")),
    )


def _take_fields(kind: Any, source: object, *, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the values that `source` has for the fields of a dataclass."""
    return {key.name: getattr(source, key.name) for key in fields(kind) if key.name not in without}


def format_machine(machine: Machine, notes: Sequence[str] = ()) -> str:
    """Return the text of a file that `find_machines` reads as this machine; `notes` become comments at its end."""
    blocks = ["\n".join(lines) for lines in _list_tables("", asdict(_make_file(machine)))]
    return "\n\n".join([*blocks, "\n".join(f"# {note}" for note in notes)]).rstrip() + "\n"


def _list_tables(name: str, values: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the lines of a table, then those of the tables in it; empty ones are left out."""
    tables = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    lines = [
        f"{key} = {_format_value(value)}" for key, value in values.items() if key not in tables and value is not None
    ]
    if lines:
        yield [*([f"[{name}]"] if name else []), *lines]
    for key, table in tables.items():
        yield from _list_tables(f"{name}.{key}".lstrip("."), table)


def _format_value(value: Any) -> str:
    """The value in TOML, numbers with five digits: JSON writes text, lists and switches as TOML does."""
    if isinstance(value, float):
        return repr(float(f"{value:.5g}"))
    return json.dumps(value, ensure_ascii=False)


def _read_machine(path: Path) -> Machine:
    hint = "compare with configs/hardware/a100-80gb.toml"
    return read_toml_as(_MachineFile, path, name="machine", check=_check, hint=hint).machine


def _check(file: _MachineFile) -> None:
    """Raises ValueError for a name or a figure that makes no sense."""
    check_name(file.name)
    if file.name == "all":
        raise ValueError("its name is 'all', which stands for every machine")
    node, rates = file.node, file.rates
    for name, count, most in (
        ("device.bytes", file.device.bytes, 2**60),
        ("node.gpus", node.gpus, MOST_RANKS),
        ("node.host_bytes", node.host_bytes, 2**60),
        ("node.sockets", node.sockets, MOST_RANKS),
        ("node.cores", node.cores, 2**20),
    ):
        if count is not None and count <= 0:
            raise ValueError(f"{name} is {count:,}; it must be above 0")
        if count is not None and count > most:
            raise ValueError(f"{name} is {count:,}; {most:,} are the most")
    for name, speed in _list_speeds(file):
        if speed is not None and not 0 < speed < 10**6:
            raise ValueError(f"{name} is {speed:g}; it must be above 0 and below 1,000,000")
    for share in ("matmul_share", "attention_share") if rates is not None else ():
        if not 0 < getattr(rates, share) <= 1:
            raise ValueError(f"rates.{share} is {getattr(rates, share):g}; it must be above 0 and at most 1")
    if rates is not None and rates.compute_capability is not None:
        parse_capability(rates.compute_capability)
    if rates is not None and file.device.bf16 != (rates.tflops.bf16 is not None):
        raise ValueError("device.bf16 and rates.tflops.bf16 contradict each other")


def _list_speeds(file: _MachineFile) -> Iterator[tuple[str, float | None]]:
    """Yield every speed with its name in the file."""
    yield "node.dram_gb_per_s", file.node.dram_gb_per_s
    yield "node.nvme_gb_per_s", file.node.nvme_gb_per_s
    for table, values in (
        ("links", file.links),
        ("rates", file.rates),
        ("rates.tflops", file.rates and file.rates.tflops),
        ("measured", file.measured),
    ):
        for key in fields(values) if values is not None else ():
            value = getattr(values, key.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                yield f"{table}.{key.name}", value
