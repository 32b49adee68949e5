"""What the user asked: parsed and checked once, then trusted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from .checks import Given, asked_base, base_of_script, global_batch_of, precisions_of, size_of
from .checks import Precision as Precision
from .errors import InputError
from .hardware import Hardware
from .ladder import Rung, all_rungs, choose
from .machine_checks import check_nodes, device_bytes_of, device_of, nvme_folder, ranks_of
from .profile import Budget as Budget
from .profile import GrowLimits as GrowLimits
from .profile import Profile as Profile
from .profile import Stop as Stop
from .profile import TimeLimits as TimeLimits
from .profile import TuneLimits as TuneLimits
from .profile import read_profile as read_profile
from .threads import asked as asked_threads
from .units import parse_seconds
from .values import Device, ModelFacts, WorkloadSource

_SEEDS = 2**32  # numpy takes no larger ones

# What the search looks for: the most samples or tokens a second, or the least device memory.
Objective = Literal["samples", "tokens", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One fit, as asked and checked. `device_bytes` is the memory of one rank's device."""

    source: WorkloadSource
    gpus: int
    device: Device
    device_bytes: int
    device_bytes_asked: bool  # given by --gpu-memory, so it has to be enforced
    out: Path
    profile: Profile
    ladder: tuple[Rung, ...]
    base: Mapping[str, Any] = field(default_factory=dict)
    global_batch: int | None = None
    nvme_path: Path | None = None
    seed: int = 0
    threads: int | None = None  # processor threads of a rank, where OMP_NUM_THREADS says them
    forecast: bool = True  # use one; trials prove what it says, so that the answer is the same without
    objective: Objective = "samples"
    precisions: tuple[str, ...] = ()  # others than the base config's that may win, too
    budget: Budget = field(default_factory=Budget)
    nodes: int = 1  # of a Ray cluster, each with as many ranks
    address: str | None = None  # of that cluster, 'auto' or HOST:PORT; None: a Ray of our own on this machine

    @property
    def ranks_per_node(self) -> int:
        """Equal on all nodes."""
        return -(-self.gpus // self.nodes)

    def fingerprint(self) -> str:
        """Equal for equal questions; a journal answers only the question it was made for."""
        said = {
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
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def resolve(
    source: WorkloadSource,
    *,
    hardware: Hardware,
    gpus: int | None = None,
    nodes: int | None = None,
    address: str | None = None,
    device: str = "cuda",
    gpu_memory: str | int | None = None,
    global_batch: int | None = None,
    precision: str = "auto",
    base_config: Given = None,
    config: str = "default",
    ladder: tuple[str, ...] = (),
    strategies: tuple[Path, ...] = (),
    nvme_path: str | Path | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    forecast: bool = True,
    objective: str = "samples",
    stop: str | None = None,
    max_trials: int | None = None,
    max_time: str | float | None = None,
) -> Settings:
    """Check what was asked against what the machine has. Raises InputError, never adjusts silently.

    hardware: of the weakest node that may be used, where `address` says a cluster.
    """
    if not 0 <= seed < _SEEDS:
        raise InputError(f"--seed {seed}: seeds are 0 to {_SEEDS - 1}")
    if out is not None and not str(out):
        raise InputError("--out is empty", mend="give a folder: --out autods-out/mine, or . for this one")
    profile = _stopping(read_profile(config), stop)
    rungs = choose(ladder or profile.ladder, all_rungs(strategies))
    kind = device_of(device, hardware)
    spread = check_nodes(nodes, address)
    ranks = ranks_of(gpus, kind, hardware, spread)
    asked = size_of(gpu_memory, "--gpu-memory")
    first, *others = precisions_of(precision)
    base = asked_base(source, base_config, first, world_size=ranks)
    total = global_batch_of(global_batch, base, ranks)
    settings = Settings(
        source=source,
        gpus=ranks,
        device=kind,
        device_bytes=device_bytes_of(asked, kind, ranks // spread, hardware),
        device_bytes_asked=asked is not None or kind == "cpu",
        out=Path(),
        profile=profile,
        ladder=rungs,
        base=base,
        global_batch=total,
        nvme_path=nvme_folder(nvme_path),
        seed=seed,
        threads=asked_threads(),
        forecast=forecast,
        objective=_objective(objective),
        precisions=tuple(others),
        budget=_budget(profile.budget, max_trials, max_time),
        nodes=spread,
        address=address,
    )
    name = f"{source.name}-{ranks}x{kind}-{settings.fingerprint()[:6]}"
    return replace(settings, out=(Path(out) if out is not None else Path("autods-out") / name).absolute())


def with_config_of(settings: Settings, facts: ModelFacts) -> Settings:
    """With the config that the survey saw a script give to the engine, under what was asked; others as they are.

    The script's own precision stays unless one was asked for; its file's train_batch_size is kept, as a base config's
    is. Raises InputError for a config that contradicts itself or what was asked.
    """
    if facts.config is None:
        return settings
    base = base_of_script(settings.source, facts.config, settings.base, world_size=settings.gpus)
    total = global_batch_of(settings.global_batch, base, settings.gpus)
    return replace(settings, base=base, global_batch=total)


def said_of(settings: Settings, facts: ModelFacts) -> tuple[str, ...]:
    """What a person should know of a script once it was looked at; settings: with its config."""
    if facts.config is None:
        return ()
    said = []
    if not {"bf16", "fp16"} & set(settings.base):
        said.append("its DeepSpeed config names no precision, so fp32 it is; --precision bf16 tries another")
    if facts.config_place:
        said.append(f"its DeepSpeed config is made in {facts.config_place}: what is found has to be given there")
    if facts.stood_in:
        said.append(f"CPU ranks do without {', '.join(facts.stood_in)}; outside of autods that needs a GPU")
    return tuple(said)


def _objective(objective: str) -> Objective:
    if objective not in get_args(Objective):
        raise InputError(
            f"there is no objective {objective!r}", mend=f"give --objective {', '.join(get_args(Objective))}"
        )
    return cast(Objective, objective)


def _stopping(profile: Profile, stop: str | None) -> Profile:
    if stop is None:
        return profile
    if stop not in get_args(Stop):
        raise InputError(f"--stop {stop!r} is neither first-fit nor fastest", mend="give --stop first-fit or fastest")
    return replace(profile, race=replace(profile.race, stop=cast(Stop, stop)))


def _budget(budget: Budget, trials: int | None, time: str | float | None) -> Budget:
    """The profile's, unless something else was asked."""
    if trials is not None and trials < 1:
        raise InputError(f"--max-trials {trials}: at least one trial is needed", mend="give --max-trials 25, say")
    try:
        seconds = budget.seconds if time is None else parse_seconds(str(time))
    except ValueError as error:
        raise InputError(f"--max-time {error}", mend="give a time such as 90s, 20m or 2h") from None
    return Budget(trials=budget.trials if trials is None else trials, seconds=seconds)
