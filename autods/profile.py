"""How hard a fit tries: profiles read from TOML. A profile only picks combinations; a rung says what it is itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .errors import InputError
from .folders import data_folder
from .toml_files import checked, read_toml
from .values import Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowLimits:
    """When growing the micro batch stops."""

    most_trials: int
    most_micro_batch: int
    gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneLimits:
    """How long Optuna may search, and by how much its answer has to win."""

    trials: int
    gain: float
    turns: int  # how often leader and start are measured again, side by side


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """Seconds before a trial counts as stuck. `init_s` holds while building and initialising."""

    stall_s: float
    init_s: float
    wall_s: float
    build_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How hard a fit tries, see `configs/*.toml`."""

    name: str
    ladder: tuple[str, ...]
    headroom: float
    walk: Steps
    timed: Steps
    grow: GrowLimits
    tune: TuneLimits
    limits: TimeLimits


def read_profile(name: str) -> Profile:
    """A shipped profile by name, or any TOML file by path."""
    folder = data_folder("configs")
    path = Path(name) if name.endswith(".toml") else folder / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(item.stem for item in folder.glob("*.toml")))
        raise InputError(f"there is no config {name!r}", mend=f"give one of {known}, or the path of a .toml file")
    mend = "compare with configs/default.toml"
    file = checked(_File, read_toml(path), _check, name="config", where=str(path), mend=mend)
    return Profile(
        name=file.name,
        ladder=file.ladder,
        headroom=file.memory.headroom,
        walk=file.walk,
        timed=file.timed,
        grow=file.grow,
        tune=file.tune,
        limits=file.limits,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    headroom: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A profile as its TOML file has it."""

    name: str
    title: str = ""
    ladder: tuple[str, ...]
    memory: _Memory
    walk: Steps
    timed: Steps
    grow: GrowLimits
    tune: TuneLimits
    limits: TimeLimits


def _check(file: _File) -> None:
    """Raises ValueError for numbers that make no sense."""
    limits = file.limits
    senses = {
        "memory.headroom must be at least 0 and below 1": 0 <= file.memory.headroom < 1,
        "warmup must be at least 0, timed at least 1, most_timed no less than timed": all(
            steps.warmup >= 0 and 1 <= steps.timed <= steps.most_timed for steps in (file.walk, file.timed)
        ),
        "grow.most_trials must be at least 0, grow.most_micro_batch at least 1": (
            file.grow.most_trials >= 0 and file.grow.most_micro_batch >= 1
        ),
        "tune.trials must be at least 0": file.tune.trials >= 0,
        "limits must be above 0 s": min(limits.stall_s, limits.init_s, limits.wall_s, limits.build_s) > 0,
    }
    for sense, holds in senses.items():
        if not holds:
            raise ValueError(sense)
