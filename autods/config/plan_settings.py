"""The settings of a plan, and of a rehearsal: requests checked against machines of the catalogue or this one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..devices import Device, find_device
from ..errors import InputError
from ..files import as_folder_name
from ..requests import FitRequest, PlanRequest, ProbeRequest
from ..system.host import Hardware
from ..types import ModelFacts, WorkloadSource
from ..units import format_bytes, parse_amount
from .base_config import (
    check_global_batch,
    check_ranks,
    find_config_place,
    merge_script_config,
    parse_size,
    resolve_base_config,
    resolve_global_batch,
)
from .catalogue import (
    ASKED,
    HERE,
    Machine,
    Site,
    describe_this_machine,
    find_by_driver_name,
    find_machines,
    make_hardware,
)
from .checkpointing import STATES, State, read_state, works_in_scripts
from .deepspeed import check_micro_batch, count_replicas, names_precision, precision_name
from .key_rules import find_misspelt_keys
from .releases import set_precision
from .rungs import Rung
from .settings import Settings, choose_folder, count_nodes, parse_time, resolve_fit, select_ladder

_ASSUMED = ", assumed"  # at the end of the name of a network in the catalogue
_MOST_IN_A_NODE = 16  # cards; DGX-2 and AWS p2.16xlarge have them
_USUAL_IN_A_NODE = 8
_HIGHEST_PRICE = 1e9
_COMPLETE_FILE = "give the file [rates] and [links], as configs/hardware/a100-80gb.toml has them"
NVME_PLACE = Path("/local_nvme")  # a placeholder; nothing is written there


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """The settings of a plan. Several sites compare machines.

    `checkpointing` is None where the forecast chooses it. `largest` asks for the largest micro batch, too.
    With `zero_init`, stage 3 builds the model under `deepspeed.zero.Init`. With `as_written`, buckets and limits are
    those of the base config, or DeepSpeed's defaults, and not those that a fit would start with.
    `stall_s` is the longest that loading or one simulation may take; None: as long as usual.
    `adopts_batch`: nobody has said a micro batch, so a script's own counts.
    `tokens` are those of a training whose duration is asked for, and `timeline` is the file for a step's trace.
    `fresh` simulates what earlier commands have simulated, too.
    `config_place` is the file of the base config, or where else it stands; None without one.
    `assumed` holds sentences about what the request leaves open.
    """

    source: WorkloadSource
    sites: tuple[Site, ...]
    ladder: tuple[Rung, ...]
    device: str = "cuda"
    checkpointing: State | None = None
    largest: bool = True
    adopts_batch: bool = False
    zero_init: bool = False
    as_written: bool = False
    stall_s: float | None = None
    tokens: float | None = None
    timeline: Path | None = None
    fresh: bool = False
    config_place: str | None = None
    assumed: tuple[str, ...] = field(default=())


def resolve_plan(request: PlanRequest, source: WorkloadSource, *, hardware: Hardware) -> PlanSettings:
    """Return the settings of a plan; `hardware` decides only what the request leaves open.

    Raises InputError for a request that contradicts itself, or that leaves open what this machine cannot answer.
    """
    checkpointing = None if request.checkpointing is None else read_state(request.checkpointing)
    if checkpointing is None and request.checkpointing is not None:
        problem = f"--checkpointing {request.checkpointing!r}: it is one of {', '.join(STATES)}"
        raise InputError(problem, hint="give --checkpointing on")
    check_global_batch(request.global_batch)
    rungs = select_ladder(request)
    device = find_device(request.device)
    if request.zero_init and source.form.runs_as_main:
        raise InputError(
            "--zero-init has no effect on a training script, which builds its model itself",
            place=source.path,
            hint="drop the option, or give the script's own arguments after --",
        )
    if checkpointing is not None and source.form.runs_as_main and not works_in_scripts(checkpointing):
        problem = (
            f"--checkpointing {checkpointing} is for models that autods builds: a script's code keeps its activations"
        )
        raise InputError(problem, place=source.path, hint="give --checkpointing on")
    if checkpointing is not None and source.keeps_checkpointing:
        raise InputError("--checkpointing and --keep-checkpointing contradict each other", hint="drop one of the two")
    nvme_bytes = parse_size(request.nvme, "--nvme")
    tokens = _parse_tokens(request.tokens)
    machines = choose_machines(request, device, hardware)
    prices = _read_prices(request, [machine.name for machine in machines])
    sites = []
    for named in machines:
        machine = replace(named, nvme_bytes=nvme_bytes or named.nvme_bytes)
        ranks, per_node = spread_ranks(request.gpus, request.nodes, machine, device)
        base = resolve_base_config(source, request.base_config, request.precision, world_size=ranks, bf16=machine.bf16)
        site = Site(
            machine=machine,
            world_size=ranks,
            ranks_per_node=per_node,
            device=device.name,
            base=base,
            nvme_path=nvme_place(request.nvme_path, machine),
            lacks_nvme="no NVMe was named (--nvme 2TiB)",
            price_per_gpu_hour=prices.get(machine.name),
        )
        sites.append(_with_base(site, base, request.micro_batch, request.global_batch))
    if not source.form.brings_config:
        _check_only_site(sites)
    return PlanSettings(
        source=source,
        sites=tuple(sites),
        ladder=rungs,
        device=device.name,
        checkpointing=checkpointing,
        largest=request.largest,
        adopts_batch=request.micro_batch is None,
        zero_init=request.zero_init or source.zero_init,
        as_written=request.as_written,
        stall_s=None if request.stall_limit is None else parse_time(request.stall_limit, "--stall-limit"),
        tokens=tokens,
        timeline=_check_timeline(request.timeline, machines),
        config_place=find_config_place(source, request.base_config),
        fresh=request.fresh,
        assumed=tuple(_list_assumptions(sites, device, request)),
    )


def choose_machines(request: PlanRequest | ProbeRequest, device: Device, hardware: Hardware) -> tuple[Machine, ...]:
    """Return the machines that a forecast is for: of the catalogue, with cards as asked, or this one."""
    device_bytes = parse_size(request.gpu_memory, "--gpu-memory")
    host_bytes = parse_size(request.host_memory, "--host-memory")
    cards = hardware.cards if device.has_cards else ()
    machines: tuple[Machine, ...]
    if request.on is not None:
        if device_bytes is not None or not device.has_cards:
            other = "--gpu-memory" if device_bytes is not None else f"--device {device.name}"
            raise InputError(f"--on names a card, so {other} has no effect", hint="drop one of the two")
        machines = find_machines(request.on)
    elif device_bytes is not None:
        machines = (Machine(name=ASKED, title="as asked", device_bytes=device_bytes, gpus=len(cards) or None),)
    elif cards:
        machines = (describe_this_machine(cards, hardware),)
    elif not device.has_cards:
        raise InputError(f"--device {device.name} has no card", hint="give --gpu-memory 80GiB")
    else:
        raise InputError(
            f"no {device.card_noun} is visible, so say which to forecast for",
            hint="give --gpu-memory 80GiB, or --on a100-80gb",
        )
    return tuple(replace(machine, host_bytes=host_bytes or machine.host_bytes) for machine in machines)


def _check_timeline(path: str | os.PathLike[str] | None, machines: Sequence[Machine]) -> Path | None:
    """Return the file. Raises InputError where there are several machines, or one without rates."""
    if path is None:
        return None
    if len(machines) > 1:
        raise InputError("--timeline shows a step on one machine", hint=f"give --on {machines[0].on}, say")
    if machines[0].rates is None:
        card = machines[0].title if machines[0].name == HERE else "the card"
        problem = f"--timeline needs the rates of {card}, which are not known"
        hint = "give --on with a machine of the catalogue, or a FILE.toml"
        raise InputError(problem, place=machines[0].file, hint=_COMPLETE_FILE if machines[0].file else hint)
    return Path(path)


def _parse_tokens(tokens: str | float | None) -> float | None:
    """Return the number of tokens. Raises InputError."""
    try:
        return None if tokens is None else parse_amount(str(tokens))
    except ValueError as error:
        raise InputError(f"--tokens {error}") from None


def _read_prices(request: PlanRequest, machines: Sequence[str]) -> Mapping[str, float]:
    """Return the price of a GPU-hour by machine. Raises InputError for a price without a machine or a sense."""
    option, given = "--price-per-gpu-hour", request.price_per_gpu_hour
    if given is None:
        return {}
    if request.tokens is None:
        raise InputError(f"{option} is the price of a training, so it needs its length", hint="give --tokens 300B, too")
    if isinstance(given, Mapping):
        pairs = [(name, str(price)) for name, price in given.items()]
    elif "=" in str(given):
        pairs = [(name.strip(), price) for name, _, price in (part.partition("=") for part in str(given).split(","))]
    elif len(machines) == 1:
        pairs = [(machines[0], str(given))]
    else:
        pairs_to_give = [f"{name}={given}" for name in machines[:3]] + ["…"] * (len(machines) > 3)
        hint = f"give {option} {','.join(pairs_to_give)} with the price of each"
        raise InputError(f"{option} {given}: several machines need a price each", hint=hint)
    prices: dict[str, float] = {}
    spelt = {name.lower(): name for name in machines}  # --on takes those of the catalogue in any case
    for given_name, text in pairs:
        name = spelt.get(given_name.lower(), given_name)
        if name not in machines:
            raise InputError(f"{option}: the plan has no machine {name!r:.60}", hint=f"of: {', '.join(machines)}")
        try:
            prices[name] = float(text)
        except ValueError:
            prices[name] = 0.0
        if not 0 < prices[name] < _HIGHEST_PRICE:
            raise InputError(f"{option} {text!r:.60} is not a price", hint="give a number such as 2.5")
    return prices


def apply_script_config_to_plan(settings: PlanSettings, facts: ModelFacts) -> PlanSettings:
    """Return the settings with the DeepSpeed config that a script gives to its engine, see `apply_survey`."""
    if facts.config is None:
        return settings
    sites = []
    for site in settings.sites:
        base = merge_script_config(settings.source, facts.config, site.base, world_size=site.world_size)
        sites.append(_with_base(site, base, site.micro_batch, site.global_batch))
    _check_only_site(sites)
    plain = not any(names_precision(site.base) for site in sites)
    sentences = ["its DeepSpeed config names no precision, so it trains in fp32 (--precision)"] if plain else []
    if settings.sites[0].global_batch is None:
        sentences += _tell_kept_batch(sites, "its DeepSpeed config")
    return replace(settings, sites=tuple(sites), assumed=(*settings.assumed, *sentences))


def adopt_script_batch(settings: PlanSettings, micro_batch: int) -> PlanSettings:
    """Return the settings with the micro batch that a script has by itself: no other one can be forecast.

    Raises InputError where it does not divide the global batch.
    """
    sites = tuple(_with_base(site, site.base, micro_batch, site.global_batch, is_fixed=True) for site in settings.sites)
    sentence = f"micro batch {micro_batch}, which the script fixes (--micro-batch); a larger one was not searched"
    assumed = (*list_but_batch(settings), sentence)
    return replace(settings, sites=sites, largest=False, adopts_batch=False, assumed=assumed)


def list_but_batch(settings: PlanSettings) -> tuple[str, ...]:
    """The assumptions but for that of a micro batch, for settings that get another one."""
    return tuple(sentence for sentence in settings.assumed if sentence not in map(_assume_batch, settings.sites))


def _assume_batch(site: Site) -> str:
    return f"micro batch {site.micro_batch} (--micro-batch)"


def _tell_kept_batch(sites: Sequence[Site], place: str) -> list[str]:
    """Say why no larger micro batch than the config's is asked about: it would change the global batch."""
    totals = {site.global_batch for site in sites} - {None}
    return [f"global batch {total}, as {place} says: micro batches divide it (--global-batch)" for total in totals]


def _with_base(
    site: Site, base: Mapping[str, Any], micro_batch: int | None, global_batch: int | None, *, is_fixed: bool = False
) -> Site:
    """Return the site with this config, and with the batch that follows from it where none is given.

    A micro batch that `is_fixed` is the script's own.
    """
    replicas, users = count_replicas(base, site.world_size), base.get("train_micro_batch_size_per_gpu")
    total = resolve_global_batch(global_batch, base, replicas, all_known=True)
    micro = micro_batch or (users if isinstance(users, int) else 1)
    check_micro_batch(micro, replicas, total, is_fixed=is_fixed)
    precision = precision_name(base)
    lacks_bf16 = precision == "bf16" and not site.machine.bf16
    problem = f"{site.machine.title} has no bf16" if lacks_bf16 else None
    return replace(set_precision(site, precision), base=base, micro_batch=micro, global_batch=total, problem=problem)


def _check_only_site(sites: Sequence[Site]) -> None:
    if len(sites) == 1 and (problem := sites[0].problem) is not None:
        raise InputError(problem, hint='give --precision fp16, or "fp16": {"enabled": true} in the base config')


def spread_ranks(gpus: int | None, nodes: int | None, machine: Machine, device: Device) -> tuple[int, int]:
    """Return world size and ranks of a node. Nodes share the ranks evenly, as those of a fit have to."""
    if gpus is None:
        if machine.gpus is None:
            raise InputError("say how many ranks to forecast for", hint="give --gpus 8, say")
        return check_ranks(machine.gpus * (nodes or 1)), machine.gpus
    check_ranks(gpus, nodes or 1)
    if nodes is None:
        nodes = count_nodes(gpus, _find_most_in_a_node(gpus, machine, device))
    return gpus, gpus // nodes


def _find_most_in_a_node(gpus: int, machine: Machine, device: Device) -> int:
    """Return how many of the ranks a node may hold. More cards than any node has are spread over nodes of eight.

    A machine of the catalogue whose cards are linked by PCIe is sold with up to eight, whatever its usual node has.
    A file of the user says how many its node has.
    """
    if machine.file is not None and machine.gpus is not None:
        return machine.gpus
    if machine.links is not None and machine.gpus is not None and machine.name != HERE:
        return max(machine.gpus, _USUAL_IN_A_NODE) if machine.links.over_pcie else machine.gpus
    if device.has_cards and gpus > _MOST_IN_A_NODE:
        return machine.gpus or _USUAL_IN_A_NODE
    return gpus


def nvme_place(path: str | os.PathLike[str] | None, machine: Machine) -> Path | None:
    """Return the NVMe folder of a forecast, which writes nothing, so that the folder need not exist here."""
    if path is not None:
        return Path(path).absolute()
    return NVME_PLACE if machine.nvme_bytes is not None else None


def _get_network(site: Site) -> str | None:
    return None if site.machine.links is None or site.nodes < 2 else site.machine.links.network


def _is_own_spread(site: Site) -> bool:
    """Whether the nodes hold another number of ranks than the machine has cards, or nothing says how many it has."""
    return site.machine.links is None or site.ranks_per_node < (site.machine.gpus or 0)


def _list_assumptions(sites: Sequence[Site], device: Device, request: PlanRequest) -> list[str]:
    """Sentences about the values that the request leaves open although the forecast depends on them."""
    spread = [site for site in sites if site.nodes > 1 and request.nodes is None and _is_own_spread(site)]
    counts = [f"{site.ranks_per_node} rank{'s' if site.ranks_per_node > 1 else ''}" for site in spread]
    assumptions = [f"{count} a node (--nodes)" for count in dict.fromkeys(counts)]
    for site in sites:
        machine = site.machine
        if machine.links is not None and machine.gpus is not None and site.ranks_per_node > machine.gpus:
            host = "" if machine.host_bytes is None else f" with {format_bytes(machine.host_bytes)} of host memory"
            box = f"{site.ranks_per_node} cards of {machine.name} in one node{host}"
            assumptions.append(f"{box} (--nodes, --on FILE.toml)")
    for network in dict.fromkeys(map(_get_network, sites)):
        if network is not None and network.endswith(_ASSUMED):
            names = ", ".join(site.machine.name for site in sites if _get_network(site) == network)
            assumptions.append(f"{network.removesuffix(_ASSUMED)} between the nodes of {names} (--on FILE.toml)")
    if request.micro_batch is None and len({site.micro_batch for site in sites}) == 1:
        assumptions.append(_assume_batch(sites[0]))
    if request.global_batch is None:
        assumptions += _tell_kept_batch(sites, "the base config")
    if not device.shares_host_memory and any(site.machine.host_bytes is None for site in sites):
        assumptions.append("host memory without a limit (--host-memory)")
    here = next((site.machine for site in sites if site.machine.name == HERE), None)
    guessed = here is not None and here.rates is not None and not here.measured.known
    if here is not None and guessed and (known := find_by_driver_name(here.title)) is not None:
        assumptions.append(f"links and host bandwidth of a usual node with {here.title}: {known.name} (--on FILE.toml)")
    return [*assumptions, *dict.fromkeys(sentence for site in sites for sentence in find_misspelt_keys(site.base))]


def resolve_rehearsal(request: FitRequest, source: WorkloadSource) -> Settings:
    """Return the settings of a fit that is rehearsed on a machine of the catalogue. Raises InputError."""
    if request.on is None:
        raise InputError(
            "--rehearse needs a machine", hint="give --on h100-80gb, say; `autods plan … --on all` shows all of them"
        )
    device = find_device(request.device)
    if not device.has_cards or request.address is not None:
        other = "--address" if device.has_cards else f"--device {device.name}"
        raise InputError(f"--rehearse runs on simulated GPUs, so {other} has no effect", hint="drop one of the two")
    if not request.forecast:
        raise InputError("--rehearse answers from the forecast, so --no-forecast leaves it without answers")
    machines = find_machines(request.on)
    if len(machines) > 1:
        raise InputError(f"--on {request.on}: a rehearsal is on one machine", hint="`autods plan` compares several")
    machine = machines[0]
    if machine.rates is None or machine.links is None:
        lacking = "the card's rates" if machine.rates is None else "the links between its cards"
        problem = f"{machine.name} lacks {lacking}, so no time can be forecast"
        raise InputError(problem, place=machine.file, hint=_COMPLETE_FILE)
    ranks, per_node = spread_ranks(request.gpus, request.nodes, machine, device)
    host_only = replace(request, nodes=None, nvme_path=None, gpus=ranks)
    settings = resolve_fit(host_only, source, hardware=make_hardware(machine, ranks))
    settings = replace(
        settings,
        machine=machine,
        rehearsed=True,
        nodes=-(-ranks // per_node),
        nvme_path=nvme_place(request.nvme_path, machine),
    )
    name = f"{as_folder_name(source.name)}-{ranks}x{machine.name}-rehearsal-{settings.fingerprint()[:6]}"
    return replace(settings, out=choose_folder(request, name))
