"""A request for a fit or a plan, checked against the machine: the settings with which it runs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from .config.base_config import (
    check_ranks,
    find_misspelt_keys,
    merge_script_config,
    parse_precisions,
    parse_size,
    precision_name,
    resolve_base_config,
    resolve_global_batch,
)
from .config.catalogue import ASKED, HERE, Machine, find_machines
from .config.profiles import Budget, Profile, Stop, read_profile
from .config.strategies import Rung, read_rungs, select_rungs
from .errors import EnvironmentBroken, InputError
from .requests import FitRequest, PlanRequest, WorkloadRequest
from .system.host import Hardware, requested_threads
from .types import Device, ModelFacts, WorkloadSource
from .units import format_bytes, parse_seconds

_PROCESS_BYTES = 2**30  # private memory of a rank before its trial begins, rounded up


def resolve_device(device: str, hardware: Hardware) -> Device:
    """Return the kind of device that ranks run on. Raises EnvironmentBroken for cards that cannot be used."""
    if device == "cpu":
        return "cpu"
    if device != "cuda":
        raise InputError(f"there is no device {device!r}", hint="give --device cuda or --device cpu")
    if hardware.unusable is not None:
        raise EnvironmentBroken(hardware.unusable)
    if not hardware.cards:
        raise InputError(
            "no CUDA GPU is visible on this machine",
            hint="use --device cpu --gpu-memory 2GiB to let CPU ranks with a memory budget stand in for GPUs",
        )
    return "cuda"


def check_nodes(nodes: int | None, address: str | None) -> int:
    """Return the number of nodes. Raises InputError for several nodes without a cluster."""
    if nodes is not None and nodes < 1:
        raise InputError(f"--nodes {nodes}: at least one node is needed")
    if nodes is not None and nodes > 1 and address is None:
        raise InputError(
            f"--nodes {nodes} needs a Ray cluster",
            hint="give --address auto or HOST:PORT, of `ray start --head`; `ray start --address HOST:PORT` adds nodes",
        )
    return nodes or 1


def resolve_ranks(gpus: int | None, device: Device, hardware: Hardware, nodes: int) -> int:
    """Return the ranks of all nodes together: on CUDA all visible cards, unless `gpus` is given."""
    if gpus is None:
        if device == "cpu":
            raise InputError("--device cpu needs the number of ranks", hint="give --gpus 2, say")
        return len(hardware.cards) * nodes
    if check_ranks(gpus) % nodes:
        raise InputError(f"--gpus {gpus} are all ranks; they cannot be split evenly over {nodes} nodes")
    if gpus // nodes > len(hardware.cards) and device == "cuda":
        reason = f"this machine shows {len(hardware.cards)} GPUs"
        if nodes > 1:
            reason = (
                f"that is {gpus // nodes} on each of {nodes} nodes, and one of them shows {len(hardware.cards)} GPUs"
            )
        raise InputError(
            f"--gpus {gpus}: {reason}",
            hint=f"give --gpus {len(hardware.cards) * nodes} or fewer (CUDA_VISIBLE_DEVICES is honoured)",
        )
    return gpus


def resolve_device_bytes(asked: int | None, device: Device, ranks: int, hardware: Hardware) -> int:
    """Return the memory of a rank's device, in bytes: `asked`, else the card's, or a share of free memory."""
    if device == "cuda":
        card = min(hardware.cards[:ranks], key=lambda card: card.usable_bytes)
        smallest = card.usable_bytes
        if asked is not None and asked > smallest:
            shared = f", of which other processes hold {format_bytes(card.others_bytes)}" if card.others_bytes else ""
            raise InputError(
                f"--gpu-memory {format_bytes(asked)}: the card has {format_bytes(card.total_bytes)}{shared}",
                hint=f"give {'what is left' if shared else 'its size'} or less; less emulates a smaller card",
            )
        return asked or smallest
    fair = int(hardware.host_free_bytes * 0.8 / ranks)
    if asked is not None and asked * ranks > hardware.host_bytes:
        raise InputError(
            f"{ranks} CPU ranks × {format_bytes(asked)} = {format_bytes(asked * ranks)}: "
            f"this machine has {format_bytes(hardware.host_bytes)}",
            hint=f"give --gpu-memory {fair // 2**20}MiB or less",
        )
    _check_process(asked or fair, hardware.process_bytes)
    return asked or fair


def _check_process(budget_bytes: int, process_bytes: int | None) -> None:
    """Raises InputError where the limit of a process is below the budget of a CPU rank."""
    if process_bytes is None or budget_bytes + _PROCESS_BYTES <= process_bytes:
        return
    less = process_bytes - _PROCESS_BYTES
    raise InputError(
        f"a CPU rank with {format_bytes(budget_bytes)} holds up to {format_bytes(_PROCESS_BYTES)} more of torch and"
        f" DeepSpeed, and `ulimit -Hd` lets a process hold {format_bytes(process_bytes)}",
        hint=f"give --gpu-memory {less // 2**20}MiB or less" if less > 0 else "raise the limit as root",
    )


def check_nvme_folder(path: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder. Raises InputError where it cannot be written."""
    if path is None:
        return None
    folder = Path(path).absolute()
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError("is not a folder that can be written", where=f"--nvme-path {path}", hint="create it first")
    return folder


_SEEDS = 2**32  # numpy takes no larger ones
# What a fit optimises: samples or tokens a second, or device memory.
Objective = Literal["samples", "tokens", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a fit, checked against the machine.

    gpus: ranks of all nodes together. device_bytes: memory of one rank's device. device_bytes_asked: --gpu-memory gave
    it, so it is enforced. threads: of a rank, where OMP_NUM_THREADS names them. precisions: further ones that may win.
    nodes, address: of a Ray cluster; without an address a Ray of autods' own runs on this machine. fresh: forget the
    finished trials of an earlier fit in `out`.
    """

    source: WorkloadSource
    gpus: int
    device: Device
    device_bytes: int
    device_bytes_asked: bool
    out: Path
    profile: Profile
    ladder: tuple[Rung, ...]
    base: Mapping[str, Any] = field(default_factory=dict)
    global_batch: int | None = None
    nvme_path: Path | None = None
    seed: int = 0
    threads: int | None = None
    forecast: bool = True
    objective: Objective = "samples"
    precisions: tuple[str, ...] = ()
    budget: Budget = field(default_factory=Budget)
    nodes: int = 1
    address: str | None = None
    fresh: bool = False

    @property
    def ranks_per_node(self) -> int:
        """The same number on every node."""
        return -(-self.gpus // self.nodes)

    def fingerprint(self) -> str:
        """Return a digest of all settings that decide the result; a journal belongs to one fingerprint."""
        decisive = {
            "workload": self.source.digest,
            "gpus": self.gpus,
            "device": self.device,
            "device_bytes": self.device_bytes if self.device_bytes_asked else "all",
            "base": self.base,
            "global_batch": self.global_batch,
            "nvme_path": str(self.nvme_path),
            "ladder": [repr(rung) for rung in self.ladder],
            "profile": repr(self.profile),
            "seed": self.seed,
            "objective": self.objective,
            "precisions": self.precisions,
            **({"nodes": self.nodes} if self.nodes > 1 else {}),
            **({} if self.threads is None else {"threads": self.threads}),
        }
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def resolve_fit(request: FitRequest, source: WorkloadSource, *, hardware: Hardware) -> Settings:
    """Return the settings of a fit. Raises InputError where the machine cannot do what the request asks for.

    hardware: this machine's, or that of the weakest node that may be used in a cluster.
    """
    if not 0 <= request.seed < _SEEDS:
        raise InputError(f"--seed {request.seed}: seeds are 0 to {_SEEDS - 1}")
    if request.out is not None and not str(request.out):
        raise InputError("--out is empty", hint="give a folder: --out autods-out/mine, or . for this one")
    profile = _apply_stop(read_profile(os.fspath(request.config)), request.stop)
    rungs = select_rungs(ladder_names(request) or profile.ladder, read_rungs(strategy_folders(request)))
    kind = resolve_device(request.device, hardware)
    nodes = check_nodes(request.nodes, request.address)
    ranks = resolve_ranks(request.gpus, kind, hardware, nodes)
    asked_bytes = parse_size(request.gpu_memory, "--gpu-memory")
    precision, *others = parse_precisions(request.precision)
    base = resolve_base_config(source, request.base_config, precision, world_size=ranks)
    global_batch = resolve_global_batch(request.global_batch, base, ranks)
    settings = Settings(
        source=source,
        gpus=ranks,
        device=kind,
        device_bytes=resolve_device_bytes(asked_bytes, kind, ranks // nodes, hardware),
        device_bytes_asked=asked_bytes is not None or kind == "cpu",
        out=Path(),
        profile=profile,
        ladder=rungs,
        base=base,
        global_batch=global_batch,
        nvme_path=check_nvme_folder(request.nvme_path),
        seed=request.seed,
        threads=requested_threads(),
        forecast=request.forecast,
        objective=_check_objective(request.objective),
        precisions=tuple(others),
        budget=_resolve_budget(profile.budget, request.max_trials, request.max_time),
        nodes=nodes,
        address=request.address,
        fresh=request.fresh,
    )
    name = f"{source.name}-{ranks}x{kind}-{settings.fingerprint()[:6]}"
    out = Path(request.out) if request.out is not None else Path("autods-out") / name
    return replace(settings, out=out.absolute())


def ladder_names(request: WorkloadRequest) -> tuple[str, ...]:
    """Return the rungs that a request names; () where it names none."""
    ladder = request.ladder
    return tuple(name.strip() for name in ladder.split(",")) if isinstance(ladder, str) else tuple(ladder)


def strategy_folders(request: WorkloadRequest) -> tuple[Path, ...]:
    """Return the folders of the user's own rungs."""
    return tuple(Path(folder) for folder in request.strategies)


def apply_script_config(settings: Settings, facts: ModelFacts) -> Settings:
    """Return the settings with the DeepSpeed config that the survey saw a script give to its engine.

    Options of the request win over that config. Its precision stays unless the request names one, and its
    train_batch_size is kept like a base config's. Settings of other workloads are returned unchanged. Raises InputError
    for a config that contradicts itself or the request.
    """
    if facts.config is None:
        return settings
    base = merge_script_config(settings.source, facts.config, settings.base, world_size=settings.gpus)
    global_batch = resolve_global_batch(settings.global_batch, base, settings.gpus)
    return replace(settings, base=base, global_batch=global_batch)


def describe_script(settings: Settings, facts: ModelFacts) -> tuple[str, ...]:
    """Return sentences about a surveyed script that its user should know. settings: with the script's config."""
    if facts.config is None:
        return ()
    sentences = []
    if not {"bf16", "fp16"} & set(settings.base):
        sentences.append(
            "its DeepSpeed config names no precision, so it trains in fp32 (--precision bf16 changes that)"
        )
    if facts.config_place:
        sentences.append(f"its DeepSpeed config is made in {facts.config_place}: put the resulting config there")
    if facts.stood_in:
        sentences.append(f"CPU ranks do without {', '.join(facts.stood_in)}; outside of autods that needs a GPU")
    return tuple(sentences)


def _check_objective(objective: str) -> Objective:
    if objective not in get_args(Objective):
        raise InputError(
            f"there is no objective {objective!r}", hint=f"give --objective {', '.join(get_args(Objective))}"
        )
    return cast(Objective, objective)


def _apply_stop(profile: Profile, stop: str | None) -> Profile:
    if stop is None:
        return profile
    if stop not in get_args(Stop):
        raise InputError(f"--stop {stop!r} is neither first-fit nor fastest", hint="give --stop first-fit or fastest")
    return replace(profile, race=replace(profile.race, stop=cast(Stop, stop)))


def _resolve_budget(budget: Budget, trials: int | None, time: str | float | None) -> Budget:
    """Return the profile's budget, with the limits that the request gives."""
    if trials is not None and trials < 1:
        raise InputError(f"--max-trials {trials}: at least one trial is needed", hint="give --max-trials 25, say")
    try:
        seconds = budget.seconds if time is None else parse_seconds(str(time))
    except ValueError as error:
        raise InputError(f"--max-time {error}", hint="give a time such as 90s, 20m or 2h") from None
    return Budget(trials=budget.trials if trials is None else trials, seconds=seconds)


_MOST_IN_A_NODE = 16  # cards; DGX-2 and AWS p2.16xlarge have them
_USUAL_IN_A_NODE = 8
NVME_PLACE = Path("/local_nvme")  # a placeholder; nothing is written there


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Ranks on one kind of machine. base: the DeepSpeed config. problem: why nothing can run there."""

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
        """Nodes of the job."""
        return -(-self.world_size // self.ranks_per_node)

    @property
    def precision(self) -> str:
        """'bf16', 'fp16' or 'fp32'."""
        return precision_name(self.base)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """The settings of a plan. Several sites compare machines.

    checkpointing: None: on, if the model can. largest: look for the largest micro batch. zero_init: stage 3 builds the
    model under `deepspeed.zero.Init`. as_written: buckets and limits are the base config's, or DeepSpeed's own, not
    those that a fit would start with. assumed: sentences about what the request leaves open.
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


def resolve_plan(request: PlanRequest, source: WorkloadSource, *, hardware: Hardware) -> PlanSettings:
    """Return the settings of a plan; `hardware` decides only what the request leaves open.

    Raises InputError for a request that contradicts itself, or that leaves open what this machine cannot answer.
    """
    checkpointing = _parse_checkpointing(request.checkpointing)
    rungs = select_rungs(ladder_names(request) or read_profile("default").ladder, read_rungs(strategy_folders(request)))
    kind = _check_device(request.device)
    if source.kind == "script":
        _check_script(source, request)
    if request.micro_batch is not None and request.micro_batch < 1:
        raise InputError(f"--micro-batch {request.micro_batch}: at least one sample is needed")
    machines = _resolve_machines(request.on, parse_size(request.gpu_memory, "--gpu-memory"), kind, hardware)
    host_bytes, nvme_bytes = parse_size(request.host_memory, "--host-memory"), parse_size(request.nvme, "--nvme")
    sites = []
    for named in machines:
        machine = replace(named, host_bytes=host_bytes or named.host_bytes, nvme_bytes=nvme_bytes or named.nvme_bytes)
        ranks, per_node = _resolve_plan_ranks(request.gpus, request.nodes, machine, kind)
        otherwise = "bf16" if machine.bf16 else "fp16"
        base = resolve_base_config(
            source, request.base_config, request.precision, world_size=ranks, otherwise=otherwise
        )
        global_batch = resolve_global_batch(request.global_batch, base, ranks)
        site = Site(
            machine=machine,
            world_size=ranks,
            ranks_per_node=per_node,
            base=base,
            micro_batch=_resolve_micro_batch(request.micro_batch, global_batch, base, ranks),
            global_batch=global_batch,
            nvme_path=nvme_place(request.nvme_path, machine),
        )
        sites.append(replace(site, problem=_find_problem(site)))
    if source.kind != "script":
        _check_only_site(sites)
    return PlanSettings(
        source=source,
        sites=tuple(sites),
        ladder=rungs,
        device=kind,
        checkpointing=checkpointing,
        largest=request.largest,
        zero_init=request.zero_init,
        as_written=request.as_written,
        assumed=tuple(_list_assumptions(sites, kind, request)),
    )


def apply_script_config_to_plan(settings: PlanSettings, facts: ModelFacts) -> PlanSettings:
    """Return the settings with the DeepSpeed config that a script gives to its engine, see `apply_script_config`."""
    if facts.config is None:
        return settings
    sites = []
    for site in settings.sites:
        base = merge_script_config(settings.source, facts.config, site.base, world_size=site.world_size)
        global_batch = resolve_global_batch(site.global_batch, base, site.world_size)
        changed = replace(
            site,
            base=base,
            global_batch=global_batch,
            micro_batch=_resolve_micro_batch(site.micro_batch, global_batch, base, site.world_size),
        )
        sites.append(replace(changed, problem=_find_problem(changed)))
    _check_only_site(sites)
    plain = not any({"bf16", "fp16"} & set(site.base) for site in sites)
    sentences = ("its DeepSpeed config names no precision, so it trains in fp32 (--precision)",) if plain else ()
    return replace(settings, sites=tuple(sites), assumed=(*settings.assumed, *sentences))


def _check_script(source: WorkloadSource, request: PlanRequest) -> None:
    options = {"--checkpointing": request.checkpointing is not None, "--zero-init": request.zero_init}
    for option, given in options.items():
        if given:
            raise InputError(
                f"{option} says nothing to a training script: it builds its model itself",
                where=source.path,
                hint="drop the option, or give the script's own arguments after --",
            )


def _check_device(device: str) -> Device:
    if device not in ("cuda", "cpu"):
        raise InputError(f"there is no device {device!r}", hint="give --device cuda or --device cpu")
    return "cpu" if device == "cpu" else "cuda"


def _resolve_machines(on: str | None, asked: int | None, device: Device, hardware: Hardware) -> tuple[Machine, ...]:
    """Return machines of the catalogue, or one with devices of the given size, or this machine."""
    if on is not None:
        if asked is not None or device == "cpu":
            other = "--gpu-memory" if asked is not None else "--device cpu"
            raise InputError(f"--on names a card, so {other} says nothing", hint="drop one of the two")
        return find_machines(on)
    cards = hardware.cards if device == "cuda" else ()
    if asked is not None:
        return (Machine(name=ASKED, title="as asked", device_bytes=asked, gpus=len(cards) or None),)
    if not cards:
        what = (
            "no CUDA GPU is visible, so say which to forecast for" if device == "cuda" else "--device cpu has no card"
        )
        hint = "give --gpu-memory 80GiB" if device == "cpu" else "give --gpu-memory 80GiB, --on a100-80gb or --on all"
        raise InputError(what, hint=hint)
    smallest = min(cards, key=lambda card: card.total_bytes)
    here = Machine(name=HERE, title=smallest.name, device_bytes=smallest.total_bytes, gpus=len(cards))
    return (replace(here, host_bytes=hardware.host_bytes, source="NVML and psutil"),)


def _resolve_plan_ranks(gpus: int | None, nodes: int | None, machine: Machine, device: Device) -> tuple[int, int]:
    """Return world size and ranks of a node. More cards than any node has are spread over nodes of eight."""
    if nodes is not None and nodes < 1:
        raise InputError(f"--nodes {nodes}: at least one node is needed")
    if gpus is None:
        if machine.gpus is None:
            raise InputError("say how many ranks to forecast for", hint="give --gpus 8, say")
        return machine.gpus * (nodes or 1), machine.gpus
    if check_ranks(gpus) % (nodes or 1):
        raise InputError(f"--gpus {gpus} are all ranks; they cannot be split evenly over {nodes} nodes")
    if nodes is None:
        catalogued = machine.links is not None and machine.gpus is not None
        if not catalogued and device == "cuda" and gpus > _MOST_IN_A_NODE:
            return gpus, machine.gpus or _USUAL_IN_A_NODE
        return gpus, min(gpus, machine.gpus or gpus) if catalogued else gpus
    return gpus, gpus // nodes


def _resolve_micro_batch(asked: int | None, total: int | None, base: Mapping[str, Any], ranks: int) -> int:
    users = base.get("train_micro_batch_size_per_gpu")
    micro = asked or (users if isinstance(users, int) else 1)
    if total is not None and total % (micro * ranks):
        raise InputError(
            f"micro batch {micro} × {ranks} ranks does not divide the global batch {total}",
            hint=f"give a --micro-batch that divides {total // ranks}",
        )
    return micro


def nvme_place(path: str | os.PathLike[str] | None, machine: Machine) -> Path | None:
    """Return the NVMe folder of a forecast, which writes nothing, so that the folder need not exist here."""
    if path is not None:
        return Path(path).absolute()
    return NVME_PLACE if machine.nvme_bytes is not None else None


def _find_problem(site: Site) -> str | None:
    return f"{site.machine.title} has no bf16" if site.precision == "bf16" and not site.machine.bf16 else None


def _check_only_site(sites: Sequence[Site]) -> None:
    if len(sites) == 1 and (problem := sites[0].problem) is not None:
        raise InputError(problem, hint='give --precision fp16, or "fp16": {"enabled": true} in the base config')


def _parse_checkpointing(value: str | bool | None) -> bool | None:
    if value not in (None, True, False, "on", "off"):
        raise InputError(f"--checkpointing {value!r}: it is on or off", hint="give --checkpointing on")
    return value == "on" if isinstance(value, str) else value


def _list_assumptions(sites: Sequence[Site], device: Device, request: PlanRequest) -> list[str]:
    """What the request leaves open although the forecast depends on it."""
    assumptions = [
        f"{site.ranks_per_node} ranks a node (--nodes)"
        for site in sites
        if site.nodes > 1 and request.nodes is None and site.machine.links is None
    ]
    if request.micro_batch is None and len({site.micro_batch for site in sites}) == 1:
        assumptions.append(f"micro batch {sites[0].micro_batch} (--micro-batch)")
    if device == "cuda" and any(site.machine.host_bytes is None for site in sites):
        assumptions.append("host memory without a limit (--host-memory)")
    return [*assumptions, *dict.fromkeys(sentence for site in sites for sentence in find_misspelt_keys(site.base))]
