"""What a forecast is asked for: checked once, then trusted. Unlike a fit it needs nothing of this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .base_config import misspelt
from .catalogue import Machine, machines_named
from .checks import Given, asked_base, base_of_script, check_ranks, global_batch_of, precision_of, size_of
from .errors import InputError
from .hardware import Hardware
from .ladder import Rung, all_rungs, choose
from .profile import read_profile
from .values import Device, ModelFacts, WorkloadSource

_MOST_IN_A_NODE = 16  # cards; DGX-2 and AWS p2.16xlarge have them
_USUAL_IN_A_NODE = 8

NVME_PLACE = Path("/local_nvme")  # stands for a folder nobody named; nothing is written there


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Ranks on one kind of machine.

    base: the DeepSpeed config with its precision. micro_batch and accumulation are those that are forecast. problem:
    why nothing can run there, or None.
    """

    machine: Machine
    world_size: int
    ranks_per_node: int
    base: Mapping[str, Any]
    micro_batch: int
    global_batch: int | None = None
    nvme_path: Path | None = None
    problem: str | None = None

    @property
    def nodes(self) -> int:
        """Of the job."""
        return -(-self.world_size // self.ranks_per_node)

    @property
    def precision(self) -> str:
        """'bf16', 'fp16' or 'fp32'."""
        return precision_of(self.base)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One forecast, as asked and checked. More than one site: which machine do I need?

    checkpointing: None where nothing was said: on, if the model can. largest: look for the largest micro batch.
    zero_init: stage 3 builds the model under `deepspeed.zero.Init`. as_written: buckets and limits are the base
    config's, or DeepSpeed's own, and not sized as a fit would start. assumed: what nobody said, in sentences.
    """

    source: WorkloadSource
    sites: tuple[Site, ...]
    ladder: tuple[Rung, ...]
    device: Device = "cuda"
    checkpointing: bool | None = None
    largest: bool = True
    zero_init: bool = False
    as_written: bool = False
    assumed: tuple[str, ...] = field(default=())


def pose(
    source: WorkloadSource,
    *,
    hardware: Hardware,
    gpus: int | None = None,
    nodes: int | None = None,
    device: str = "cuda",
    on: str | None = None,
    gpu_memory: str | int | None = None,
    host_memory: str | int | None = None,
    nvme: str | int | None = None,
    nvme_path: str | Path | None = None,
    micro_batch: int | None = None,
    global_batch: int | None = None,
    precision: str = "auto",
    checkpointing: str | None = None,
    base_config: Given = None,
    ladder: tuple[str, ...] = (),
    strategies: tuple[Path, ...] = (),
    largest: bool = True,
    zero_init: bool = False,
    as_written: bool = False,
) -> Question:
    """Check what was asked. `hardware` answers only what nobody said. Raises InputError, never adjusts silently."""
    rungs = choose(ladder or read_profile("default").ladder, all_rungs(strategies))
    kind = _device(device)
    if source.kind == "script":
        _check_script(source, checkpointing=checkpointing, zero_init=zero_init)
    if micro_batch is not None and micro_batch < 1:
        raise InputError(f"--micro-batch {micro_batch}: at least one sample is needed")
    machines = _machines(on, size_of(gpu_memory, "--gpu-memory"), kind, hardware)
    host_bytes, nvme_bytes = size_of(host_memory, "--host-memory"), size_of(nvme, "--nvme")
    sites = []
    for machine in machines:
        own = replace(machine, host_bytes=host_bytes or machine.host_bytes, nvme_bytes=nvme_bytes or machine.nvme_bytes)
        ranks, per_node = _ranks(gpus, nodes, own, kind)
        otherwise = "bf16" if own.bf16 else "fp16"
        base = asked_base(source, base_config, precision, world_size=ranks, otherwise=otherwise)
        total = global_batch_of(global_batch, base, ranks)
        site = Site(
            machine=own,
            world_size=ranks,
            ranks_per_node=per_node,
            base=base,
            micro_batch=_micro_batch(micro_batch, total, base, ranks),
            global_batch=total,
            nvme_path=nvme_place(nvme_path, own),
        )
        sites.append(replace(site, problem=_problem(site)))
    if source.kind != "script":
        _check_one(sites)
    return Question(
        source=source,
        sites=tuple(sites),
        ladder=rungs,
        device=kind,
        checkpointing=_checkpointing(checkpointing),
        largest=largest,
        zero_init=zero_init,
        as_written=as_written,
        assumed=tuple(_assumed(sites, kind, said_micro=micro_batch is not None, said_nodes=nodes is not None)),
    )


def with_config_of(question: Question, facts: ModelFacts) -> Question:
    """With the config that a script was seen to give to its engine, under what was asked; others as they are.

    Its own precision stays unless one was asked for, and its file's train_batch_size is kept. Raises InputError for a
    config that contradicts itself or what was asked.
    """
    if facts.config is None:
        return question
    sites = []
    for site in question.sites:
        base = base_of_script(question.source, facts.config, site.base, world_size=site.world_size)
        total = global_batch_of(site.global_batch, base, site.world_size)
        own = replace(
            site,
            base=base,
            global_batch=total,
            micro_batch=_micro_batch(site.micro_batch, total, base, site.world_size),
        )
        sites.append(replace(own, problem=_problem(own)))
    _check_one(sites)
    plain = not any({"bf16", "fp16"} & set(site.base) for site in sites)
    said = ("its DeepSpeed config names no precision, so fp32 it is (--precision)",) if plain else ()
    return replace(question, sites=tuple(sites), assumed=(*question.assumed, *said))


def _check_script(source: WorkloadSource, *, checkpointing: str | None, zero_init: bool) -> None:
    for option, given in (("--checkpointing", checkpointing is not None), ("--zero-init", zero_init)):
        if given:
            raise InputError(
                f"{option} says nothing to a training script: it builds its model itself",
                where=source.path,
                mend="drop the option, or give the script's own arguments after --",
            )


def _device(device: str) -> Device:
    if device not in ("cuda", "cpu"):
        raise InputError(f"there is no device {device!r}", mend="give --device cuda or --device cpu")
    return "cpu" if device == "cpu" else "cuda"


def _machines(on: str | None, asked: int | None, device: Device, hardware: Hardware) -> tuple[Machine, ...]:
    """The catalogue's, or one of the size that was asked for, or this one."""
    if on is not None:
        if asked is not None or device == "cpu":
            other = "--gpu-memory" if asked is not None else "--device cpu"
            raise InputError(f"--on names a card, so {other} says nothing", mend="drop one of the two")
        return machines_named(on)
    cards = hardware.cards if device == "cuda" else ()
    if asked is not None:
        return (Machine(name="asked", title="as asked", device_bytes=asked, gpus=len(cards) or None),)
    if not cards:
        what = (
            "no CUDA GPU is visible, so say which to forecast for" if device == "cuda" else "--device cpu has no card"
        )
        mend = "give --gpu-memory 80GiB" if device == "cpu" else "give --gpu-memory 80GiB, --on a100-80gb or --on all"
        raise InputError(what, mend=mend)
    smallest = min(cards, key=lambda card: card.total_bytes)
    here = Machine(name="here", title=smallest.name, device_bytes=smallest.total_bytes, gpus=len(cards))
    return (replace(here, host_bytes=hardware.host_bytes, source="NVML and psutil"),)


def _ranks(gpus: int | None, nodes: int | None, machine: Machine, device: Device) -> tuple[int, int]:
    """World size and ranks of a node; more cards than any node has are taken to be on nodes of eight."""
    if nodes is not None and nodes < 1:
        raise InputError(f"--nodes {nodes}: at least one node is needed")
    if gpus is None:
        if machine.gpus is None:
            raise InputError("say how many ranks to forecast for", mend="give --gpus 8, say")
        return machine.gpus * (nodes or 1), machine.gpus
    if check_ranks(gpus) % (nodes or 1):
        raise InputError(f"--gpus {gpus} are all ranks; they cannot be split evenly over {nodes} nodes")
    if nodes is None:
        catalogued = machine.links is not None and machine.gpus is not None
        if not catalogued and device == "cuda" and gpus > _MOST_IN_A_NODE:
            return gpus, machine.gpus or _USUAL_IN_A_NODE
        return gpus, min(gpus, machine.gpus or gpus) if catalogued else gpus
    return gpus, gpus // nodes


def _micro_batch(asked: int | None, total: int | None, base: Mapping[str, Any], ranks: int) -> int:
    users = base.get("train_micro_batch_size_per_gpu")
    micro = asked or (users if isinstance(users, int) else 1)
    if total is not None and total % (micro * ranks):
        raise InputError(
            f"micro batch {micro} × {ranks} ranks does not divide the global batch {total}",
            mend=f"give a --micro-batch that divides {total // ranks}",
        )
    return micro


def nvme_place(path: str | Path | None, machine: Machine) -> Path | None:
    """Where a forecast takes NVMe to be. It writes nothing, so the folder need not exist here."""
    if path is not None:
        return Path(path).absolute()
    return NVME_PLACE if machine.nvme_bytes is not None else None


def _problem(site: Site) -> str | None:
    return f"{site.machine.title} has no bf16" if site.precision == "bf16" and not site.machine.bf16 else None


def _check_one(sites: Sequence[Site]) -> None:
    if len(sites) == 1 and (problem := sites[0].problem) is not None:
        raise InputError(problem, mend='give --precision fp16, or "fp16": {"enabled": true} in the base config')


def _checkpointing(said: str | None) -> bool | None:
    if said not in (None, "on", "off"):
        raise InputError(f"--checkpointing {said!r}: it is on or off", mend="give --checkpointing on")
    return None if said is None else said == "on"


def _assumed(sites: Sequence[Site], device: Device, *, said_micro: bool, said_nodes: bool) -> list[str]:
    """What nobody said and the answer depends on."""
    said = [
        f"{site.ranks_per_node} ranks a node (--nodes)"
        for site in sites
        if site.nodes > 1 and not said_nodes and site.machine.links is None
    ]
    if not said_micro and len({site.micro_batch for site in sites}) == 1:
        said.append(f"micro batch {sites[0].micro_batch} (--micro-batch)")
    if device == "cuda" and any(site.machine.host_bytes is None for site in sites):
        said.append("host memory without a limit (--host-memory)")
    return [*said, *dict.fromkeys(one for site in sites for one in misspelt(site.base))]
