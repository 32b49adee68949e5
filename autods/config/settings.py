"""The settings of a fit: a `SearchRequest` checked against the machine."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from ..devices import Card, Device, find_device
from ..errors import EnvironmentBroken, InputError
from ..files import as_folder_name
from ..requests import SearchRequest, TrialRequest, WorkloadRequest
from ..system.host import Hardware, installed_versions, requested_threads
from ..types import Knobs, ModelFacts, WorkloadSource
from ..units import format_bytes, parse_seconds
from .base_config import (
    check_global_batch,
    check_ranks,
    merge_script_config,
    parse_precisions,
    parse_size,
    resolve_base_config,
    resolve_global_batch,
)
from .catalogue import Machine, Site, describe_this_machine
from .deepspeed import (
    SEQUENCE_RANKS,
    count_replicas,
    count_sequence_sharers,
    default_accumulation,
    names_precision,
    precision_name,
)
from .profiles import Budget, Profile, Stop, read_profile
from .releases import set_precision
from .rungs import Rung, list_ladder, read_rungs, select_rungs

_PROCESS_BYTES = 2**30  # private memory of a rank before its trial begins, rounded up
SPARE_HOST = 0.2  # share of the free host memory that CPU ranks without a given size leave to others
_MEASURING_SOFTWARE = ("autods", "torch", "deepspeed", "transformers")
_VARIABLE = re.compile(r"[A-Za-z_*?\[][\w*?\[\]!-]*", re.ASCII)  # or a pattern of several


def resolve_device(name: str, hardware: Hardware) -> Device:
    """Return the device that ranks run on. Raises EnvironmentBroken for cards that cannot be used."""
    device = find_device(name)
    if device.has_cards and hardware.unusable is not None:
        raise EnvironmentBroken(hardware.unusable)
    if device.has_cards and not hardware.cards:
        raise InputError(
            f"no {device.card_noun} is visible on this machine",
            hint="use --device cpu --gpu-memory 2GiB to let CPU ranks with a memory budget stand in for GPUs",
        )
    return device


def check_nodes(nodes: int | None, address: str | None) -> int:
    """Return the number of nodes. Raises InputError for several nodes without a cluster."""
    if nodes is not None and nodes > 1 and address is None:
        raise InputError(
            f"--nodes {nodes} needs a Ray cluster",
            hint="give --address auto or HOST:PORT, of `ray start --head`; `ray start --address HOST:PORT` adds nodes",
        )
    return nodes or 1


def count_nodes(ranks: int, ranks_per_node: int) -> int:
    """Return the fewest nodes that share the ranks evenly, with so many on each at most."""
    fewest = -(-ranks // ranks_per_node)
    return next(nodes for nodes in range(fewest, ranks + 1) if ranks % nodes == 0)


def check_exported(names: str | Sequence[str], address: str | None) -> tuple[str, ...]:
    """Return the names of --export. Raises InputError for what is no variable, and where there is no cluster."""
    exported = split_names(names)
    for name in exported:
        if not _VARIABLE.fullmatch(name):
            problem = f"--export {name}: is not the name of an environment variable, nor a pattern such as DATA_*"
            raise InputError(problem)
    if exported and address is None:
        raise InputError(
            "--export is for the nodes of a cluster, so it has no effect without --address",
            hint="drop it: ranks on this machine get the whole environment",
        )
    return exported


def resolve_ranks(gpus: int | None, device: Device, hardware: Hardware, nodes: int) -> int:
    """Return the ranks of all nodes together: one on each visible card, unless `gpus` is given."""
    cards = len(hardware.cards)
    if gpus is None:
        if not device.has_cards:
            raise InputError(f"--device {device.name} needs the number of ranks", hint="give --gpus 2, say")
        return cards * nodes
    check_ranks(gpus, nodes)
    if gpus // nodes > cards and device.has_cards:
        reason = f"this machine shows {cards} GPUs"
        if nodes > 1:
            reason = f"that is {gpus // nodes} on each of {nodes} nodes, and one of them shows {cards} GPUs"
        hint = f"give --gpus {cards * nodes} or fewer ({device.visible_variable} is honoured)"
        raise InputError(f"--gpus {gpus}: {reason}", hint=hint)
    return gpus


def resolve_device_bytes(given: int | None, device: Device, ranks: int, hardware: Hardware) -> int:
    """Return the memory of a rank's device, in bytes: `given`, else the card's, or a share of free memory."""
    if not device.shares_host_memory:
        card = min(hardware.cards[:ranks], key=lambda card: card.usable_bytes)
        if given is not None and given > card.usable_bytes:
            shared = f", of which other processes hold {format_bytes(card.others_bytes)}" if card.others_bytes else ""
            raise InputError(
                f"--gpu-memory {format_bytes(given)}: the card has {format_bytes(card.total_bytes)}{shared}",
                hint=f"give {'what is left' if shared else 'its size'} or less; less emulates a smaller card",
            )
        return given or card.usable_bytes
    fair = int(hardware.host_free_bytes * (1 - SPARE_HOST) / ranks)
    if given is not None and given * ranks > hardware.host_bytes:
        raise InputError(
            f"{ranks} CPU ranks × {format_bytes(given)} = {format_bytes(given * ranks)}: "
            f"this machine has {format_bytes(hardware.host_bytes)}",
            hint=f"give --gpu-memory {fair // 2**20}MiB or less" if fair >= 2**20 else "give fewer --gpus",
        )
    budget, most = given or fair, hardware.process_bytes
    if most is not None and budget + _PROCESS_BYTES > most:
        left = (most - _PROCESS_BYTES) // 2**20
        raise InputError(
            f"a CPU rank with {format_bytes(budget)} holds up to {format_bytes(_PROCESS_BYTES)} more of torch and"
            f" DeepSpeed, and `ulimit -Hd` lets a process hold {format_bytes(most)}",
            hint=f"give --gpu-memory {left}MiB or less" if left > 0 else "raise the limit as root",
        )
    return budget


def describe_platform(device: Device, cards: Sequence[Card], hardware: Hardware) -> tuple[str, ...]:
    """Return the names and versions of all that measures: trials of another platform answer another question."""
    versions = installed_versions()
    software = tuple(f"{name} {versions[name]}" for name in _MEASURING_SOFTWARE)
    if not device.has_cards:
        return hardware.cpu, *software
    names = sorted({f"{card.name}, {round(card.total_bytes / 2**30)} GiB" for card in cards})
    allocator = (f"{name}={os.environ[name]}" for name in device.allocator_variables if os.environ.get(name))
    return *names, *software, *allocator


_SEEDS = 2**32  # numpy takes no larger ones
_NAMED = ("global_batch", "nvme_path", "seed", "objective", "nodes", "threads")  # options that decide a trial
# What a fit optimises: samples or tokens a second, or device memory.
Objective = Literal["samples", "tokens", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a fit, checked against the machine.

    `gpus` counts the ranks of all nodes together. `device_bytes` is the memory of one rank's device;
    `device_bytes_asked` is true where --gpu-memory gave it, and false where it is what was free at the start.
    `threads` is the number for one rank that OMP_NUM_THREADS names, if it does. `precisions` are further ones that may
    win. `platform` has the names and versions of what measures, see `describe_platform`.
    `nodes` and `address` describe a Ray cluster. Without an address autods starts Ray on this machine.
    `hardware` is that of the weakest node. `exported` names environment variables that the nodes get besides the usual.
    `fresh` forgets the finished trials of an earlier fit in `out`.
    `machine` is the node's, of which `site` has the ranks. In a rehearsal its simulation answers the trials.
    """

    source: WorkloadSource
    gpus: int
    device: str
    device_bytes: int
    device_bytes_asked: bool
    out: Path
    profile: Profile
    ladder: tuple[Rung, ...]
    hardware: Hardware = field(compare=False)  # its free memory changes all the time
    machine: Machine
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
    exported: tuple[str, ...] = ()
    platform: tuple[str, ...] = ()
    fresh: bool = False
    rehearsed: bool = False

    @property
    def is_limited(self) -> bool:
        """Whether ranks are held to `device_bytes`: a part of their card, or of the host for CPU ranks."""
        return self.device_bytes_asked or find_device(self.device).shares_host_memory

    @property
    def usable_bytes(self) -> float:
        """The memory of a rank's device less the headroom of the profile."""
        return self.device_bytes * (1 - self.profile.memory.headroom)

    def find_limit(self, knobs: Knobs) -> int:
        """Return the bytes of its device that a rank with these knobs may use."""
        return int(self.usable_bytes) if knobs.keeps_headroom else self.device_bytes

    @property
    def ranks_per_node(self) -> int:
        """The same number on every node."""
        return -(-self.gpus // self.nodes)

    @property
    def site(self) -> Site:
        """The ranks and where they run. The machine's device has the memory that a rank may use."""
        site = Site(
            machine=replace(self.machine, device_bytes=self.device_bytes),
            world_size=self.gpus,
            ranks_per_node=self.ranks_per_node,
            device=self.device,
            base=self.base,
            global_batch=self.global_batch,
            nvme_path=self.nvme_path,
        )
        return set_precision(site, precision_name(self.base))

    @property
    def default_accumulation(self) -> int:
        """The micro batches of a step where no global batch decides."""
        return default_accumulation(self.base, self.source.form)

    def rung(self, name: str) -> Rung:
        return next(rung for rung in self.ladder if rung.name == name)

    def fingerprint(self) -> str:
        """Return a digest of all settings that decide a trial; a journal belongs to one fingerprint.

        It leaves out what only decides how many of these trials are run: the budget, and whether rungs are forecast.
        """
        return hashlib.sha256(json.dumps(self._decisive, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def options(self) -> dict[str, str]:
        """The parts of the fingerprint by the names that a user knows them by, as they are compared and shown.

        A fit of another fingerprint differs in one of them, or in a setting of the search that has no name here.
        """
        decisive, software = self._decisive, tuple(f"{name} " for name in _MEASURING_SOFTWARE)
        versions = {name: version for name, _, version in (each.partition(" ") for each in self.platform)}
        return {
            "workload": self.source.digest[:6],
            **{name: value for name, value in _name_options(self.source).items() if value is not None},
            "--gpus": str(self.gpus),
            "--device": self.device,
            "--gpu-memory": format_bytes(self.device_bytes) if self.device_bytes_asked else "all",
            "--config": self.profile.name,
            "--stop": self.profile.race.stop,
            "--ladder": ",".join(rung.name for rung in self.ladder),
            "--precision": self.precision,
            "DeepSpeed config": hashlib.sha256(json.dumps(self.base, sort_keys=True).encode()).hexdigest()[:6],
            "hardware": ", ".join(each for each in self.platform if not each.startswith(software)),
            **{name: versions[name] for name in _MEASURING_SOFTWARE if name in versions},
            **{f"--{name.replace('_', '-')}": str(decisive[name]) for name in _NAMED if decisive.get(name) is not None},
        }

    @property
    def precision(self) -> str:
        """What --precision asked for, or the base config has: 'bf16', or 'bf16,fp32' where either may win."""
        return ",".join((precision_name(self.base), *self.precisions))

    @property
    def _decisive(self) -> dict[str, Any]:
        return {
            "workload": self.source.digest,
            "gpus": self.gpus,
            "device": self.device,
            "device_bytes": self.device_bytes if self.device_bytes_asked else "all",
            "base": self.base,
            "global_batch": self.global_batch,
            **({"accumulation": each} if self.global_batch is None and (each := self.default_accumulation) > 1 else {}),
            "nvme_path": str(self.nvme_path),
            "ladder": [repr(rung) for rung in self.ladder],
            "profile": repr(replace(self.profile, budget=Budget())),
            "platform": self.platform,
            "seed": self.seed,
            "objective": self.objective,
            "precisions": self.precisions,
            **({"nodes": self.nodes} if self.nodes > 1 else {}),
            **({} if self.threads is None else {"threads": self.threads}),
            **({"rehearsed_on": repr(self.machine)} if self.rehearsed else {}),
        }


def _name_options(source: WorkloadSource) -> dict[str, str | None]:
    """Return what the user said of the workload, by the names of the options; its digest covers them, too."""
    return {
        **_as_text({"arguments after --": shlex.join(source.argv), "--kind": source.script_kind}),
        **name_training_options(source),
        **_as_text({"--sequence-parallel": source.sequence_parallel, "--tiled-loss": source.tiled_loss}),
    }


def name_training_options(source: WorkloadSource) -> dict[str, str | None]:
    """Return the options of a workload that decide what is trained, on which samples; None for those not given."""
    return _as_text({
        "--task": source.task,
        "--seq-len": source.seq_len,
        "--target-len": source.target_len,
        "--lora": source.lora,
        "--weights": source.weights,
    })  # fmt: skip


def _as_text(options: Mapping[str, object]) -> dict[str, str | None]:
    return {name: None if value in (None, False, "") else str(value) for name, value in options.items()}


def resolve_fit(request: SearchRequest, source: WorkloadSource, *, hardware: Hardware) -> Settings:
    """Return the settings of a fit. Raises InputError where the machine cannot do what the request asks for.

    `hardware` is this machine's, or that of the weakest node that may be used in a cluster.
    """
    if not 0 <= request.seed < _SEEDS:
        raise InputError(f"--seed {request.seed}: seeds are 0 to {_SEEDS - 1}")
    check_global_batch(request.global_batch)
    profile = read_profile(os.fspath(request.config))
    if request.stop is not None:
        if request.stop not in get_args(Stop):
            problem = f"--stop {request.stop!r} is neither first-fit nor fastest"
            raise InputError(problem, hint="give --stop first-fit or fastest")
        profile = replace(profile, race=replace(profile.race, stop=cast(Stop, request.stop)))
    if request.stall_limit is not None:
        stall_s = parse_time(request.stall_limit, "--stall-limit")
        profile = replace(profile, limits=profile.limits.allow_silence(stall_s))
    rungs = select_ladder(request, profile.ladder)
    device = resolve_device(request.device, hardware)
    nodes = check_nodes(request.nodes, request.address)
    ranks = resolve_ranks(request.gpus, device, hardware, nodes)
    asked_bytes = parse_size(request.gpu_memory, "--gpu-memory")
    precision, *others = parse_precisions(request.precision)
    cards = hardware.cards[: ranks // nodes] if device.has_cards else ()
    bf16 = all(card.bf16 for card in cards)
    base = resolve_base_config(source, request.base_config, precision, world_size=ranks, bf16=bf16)
    global_batch = request.global_batch
    if not source.form.brings_config:  # else the script's config has a say, after the survey
        global_batch = resolve_global_batch(global_batch, base, count_replicas(base, ranks))
    nvme_path = None if request.nvme_path is None else Path(request.nvme_path).absolute()
    if nvme_path is not None and not (os.path.isdir(nvme_path) and os.access(nvme_path, os.W_OK)):
        place = f"--nvme-path {os.fspath(request.nvme_path or '')}"
        raise InputError("is not a folder that can be written", place=place, hint="create it first")
    if request.objective not in get_args(Objective):
        hint = f"give --objective {', '.join(get_args(Objective))}"
        raise InputError(f"there is no objective {request.objective!r}", hint=hint)
    settings = Settings(
        source=source,
        gpus=ranks,
        device=device.name,
        device_bytes=resolve_device_bytes(asked_bytes, device, ranks // nodes, hardware),
        device_bytes_asked=asked_bytes is not None,
        out=Path(),
        profile=profile,
        ladder=rungs,
        hardware=hardware,
        machine=describe_this_machine(cards, hardware),
        base=base,
        global_batch=global_batch,
        nvme_path=nvme_path,
        seed=request.seed,
        threads=requested_threads(),
        forecast=request.forecast,
        objective=cast(Objective, request.objective),
        precisions=tuple(others),
        budget=_resolve_budget(profile.budget, request.max_trials, request.max_time),
        nodes=nodes,
        address=request.address,
        exported=check_exported(request.export, request.address),
        platform=describe_platform(device, cards, hardware),
        fresh=request.fresh,
    )
    name = f"{as_folder_name(source.name)}-{ranks}x{device.name}-{settings.fingerprint()[:6]}"
    return replace(settings, out=choose_folder(request, name))


def refuse_shared_sequences(settings: Settings) -> Settings:
    """Return the settings. Raises InputError where ranks share the sequences of a Hugging Face config.

    What a fit or a run hands over trains with plain DeepSpeed, which does not set that up by itself.
    """
    if (sharers := count_sequence_sharers(settings.source, settings.base)) > 1:
        hint = "give a training script that sets it up (UlyssesSPAttentionHF), or autods plan and probe for this config"
        raise InputError(f"{SEQUENCE_RANKS} {sharers}: only a script trains so", place=settings.source.path, hint=hint)
    return settings


def choose_folder(request: TrialRequest, name: str) -> Path:
    """Return the folder for the results: that of the request, else one of this name."""
    return (Path(request.out) if request.out is not None else Path("autods-out") / name).absolute()


def _resolve_budget(budget: Budget, trials: int | None, time: str | float | None) -> Budget:
    """Return the profile's budget, with the limits that the request gives."""
    seconds = budget.seconds if time is None else parse_time(time, "--max-time")
    return Budget(trials=budget.trials if trials is None else trials, seconds=seconds)


def parse_time(time: str | float, option: str) -> float:
    """Return the seconds. Raises InputError that names the option."""
    try:
        return parse_seconds(str(time))
    except ValueError as error:
        raise InputError(f"{option} {error}") from None


def select_ladder(request: WorkloadRequest, otherwise: tuple[str, ...] = ()) -> tuple[Rung, ...]:
    """Return the rungs that a request names, those of `otherwise`, or else the ladder, fastest first.

    Those that it adds come to them. Raises InputError.
    """
    rungs = read_rungs(tuple(Path(folder) for folder in request.strategies))
    names = split_names(request.ladder) or otherwise or list_ladder(rungs)
    lossy = [name for name, rung in rungs.items() if rung.lossy and request.lossy]
    return select_rungs((*names, *split_names(request.with_rungs), *lossy), rungs)


def split_names(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of 'a, b', or of a list."""
    return tuple(name.strip() for name in given.split(",")) if isinstance(given, str) else tuple(given)


def apply_survey(settings: Settings, facts: ModelFacts) -> Settings:
    """Return the settings with the config that the survey saw a script give to its engine, and with the global batch.

    Options of the request win over a script's config. Its precision stays unless the request names one, and its global
    batch is kept like a base config's. Raises InputError for a config that contradicts itself or the request, and for
    ranks that cannot be split into replicas of the model.
    """
    base, ranks, each = settings.base, settings.gpus, facts.replica_ranks
    if ranks % each:
        raise InputError(
            f"the model is a pipeline that takes {each} ranks, and {ranks} is no multiple of that",
            hint=f"give --gpus {max(each, ranks // each * each)}, or another multiple of {each}",
        )
    if facts.config is not None:
        base = merge_script_config(settings.source, facts.config, base, world_size=ranks)
    replicas = count_replicas(base, ranks, facts)
    global_batch = resolve_global_batch(settings.global_batch, base, replicas, all_known=True)
    return replace(settings, base=base, global_batch=global_batch)


def check_precision(settings: Settings, problems: Mapping[str, str]) -> None:
    """Raise InputError where the device lacks the precision of the config; `problems` has the reason of a survey."""
    precision = precision_name(settings.base)
    if (problem := problems.get(precision)) is not None:
        raise InputError(
            f"{problem}, and the config trains in {precision}",
            place=settings.source.path,
            hint="give --precision bf16 or fp32; where the script itself casts to half precision, change it there, too",
        )


# What keeps the writes of a script out of the user's folders.
KEPT_BY_KERNEL = "in trials the kernel (Landlock) refuses what the script would write outside their folders and caches"
KEPT_BY_PYTHON = "in trials only Python's writes are redirected (no Landlock here): C libraries really write"


def describe_script(settings: Settings, facts: ModelFacts) -> tuple[str, ...]:
    """Return sentences about a surveyed script that its user should know. `settings` hold the script's config."""
    if facts.config is None:
        return ()
    sentences = [f"warning: {text}" for text in facts.warnings]
    if not names_precision(settings.base):
        sentences.append(
            "its DeepSpeed config names no precision, so it trains in fp32 (--precision bf16 changes that)"
        )
    if facts.config_place:
        sentences.append(f"its DeepSpeed config is made in {facts.config_place}: put the resulting config there")
    if facts.stood_in:
        sentences.append(f"CPU ranks do without {', '.join(facts.stood_in)}; outside of autods that needs a GPU")
    sentences.append(KEPT_BY_KERNEL if facts.writes_confined else KEPT_BY_PYTHON)
    return tuple(sentences)
