"""How hard a fit tries: profiles read from TOML. A profile only picks combinations; rungs have their own files."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..errors import InputError
from ..schema import check_name, read_toml_as
from ..system.host import data_folder
from ..types import Steps
from ..units import MOST_SECONDS

Stop = Literal["first-fit", "fastest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowLimits:
    """When growing the micro batch stops."""

    most_trials: int
    most_micro_batch: int
    gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceLimits:
    """How the rungs that fit compete.

    With `stop` "first-fit", the first rung tried that fits wins; with "fastest", the others race against it.
    `noise` is the relative error of a short timing. `most_trials` limits the trials that grow a rival's batch.
    `steps` are those of a rival's trials, `finals` those of the last comparison, which repeats `turns` times.
    `checkpointing` also races configs without gradient checkpointing.
    """

    stop: Stop
    noise: float
    most_trials: int
    finalists: int
    turns: int
    steps: Steps
    finals: Steps
    checkpointing: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CertifyLimits:
    """The proofs that the winner has to pass.

    `most_trials` limits the trials of the worst case; 0 skips the certificate. `parity` are the steps whose losses
    are compared; None skips the comparison.
    """

    most_trials: int
    steps: Steps
    parity: Steps | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of a fit, its certificate included: what they leave no room for is not tried. 0: no limit."""

    trials: int = 0
    seconds: float = 0.0

    def covers(self, other: Budget) -> bool:
        """Whether a search within this budget answers one within the other: neither limit is lower here."""
        limits = ((self.trials, other.trials), (self.seconds, other.seconds))
        return all(not limit or 0 < least <= limit for limit, least in limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneLimits:
    """How many trials Optuna may run, and by which factor its answer has to win.

    `priced` settings are priced instead where step times are forecast, and only the best of them are run; 0: none.
    """

    trials: int
    priced: int = 0
    gain: float
    turns: int  # at most, in which leader and start are measured again, side by side


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """Seconds after which a trial counts as stuck. `init_s` replaces `stall_s` while it builds and initialises.

    They hold for small models; `runner.time_limits` adds seconds for the bytes of a large one.
    """

    stall_s: float
    init_s: float
    wall_s: float
    build_s: float

    def allow_silence(self, stall_s: float) -> TimeLimits:
        """Return the limits with this `stall_s`; a longer one lengthens the others in proportion."""
        longer = max(1.0, stall_s / self.stall_s)
        return TimeLimits(
            stall_s=stall_s, init_s=longer * self.init_s, wall_s=longer * self.wall_s, build_s=longer * self.build_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """`headroom` is the share of the device that growing and tuning leave free."""

    headroom: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How hard a fit tries, as `configs/*.toml` describes it. `ladder` names its rungs; none: all."""

    name: str
    title: str = ""
    ladder: tuple[str, ...] = ()
    memory: MemoryLimits
    walk: Steps
    timed: Steps
    grow: GrowLimits
    race: RaceLimits
    tune: TuneLimits
    certify: CertifyLimits
    limits: TimeLimits
    budget: Budget = field(default_factory=Budget)


def read_profile(name: str) -> Profile:
    """Read a shipped profile by name, or any TOML file by path. Raises InputError."""
    path = find_toml(name, data_folder("configs"), "config")
    hint = "compare with configs/default.toml"
    return read_toml_as(Profile, path, name="config", check=_check, hint=hint)


def find_toml(name: str, folder: Path, kind: str) -> Path:
    """Return the path of a file that is shipped in this folder, or that the user named by its path."""
    shipped = {path.stem: path for path in sorted(folder.glob("*.toml"))}
    path = Path(name) if name.endswith(".toml") and os.path.lexists(name) else shipped.get(name)
    if path is None:
        hint = f"give one of {', '.join(shipped)}, or the path of a .toml file"
        raise InputError(f"there is no {kind} {name!r:.200}", hint=hint)
    return path


_MOST = 1_000_000


def _check(profile: Profile) -> None:
    """Raises ValueError for a name or numbers that make no sense."""
    check_name(profile.name)
    limits, grow, race, certify = profile.limits, profile.grow, profile.race, profile.certify
    all_steps = (profile.walk, profile.timed, race.steps, race.finals, certify.steps, certify.parity or certify.steps)
    rules = {
        "memory.headroom must be at least 0 and below 1": 0 <= profile.memory.headroom < 1,
        "warmup must be at least 0, timed at least 1, most_timed no less than timed": all(
            steps.warmup >= 0 and 1 <= steps.timed <= steps.most_timed for steps in all_steps
        ),
        "grow.most_trials must be at least 0, grow.most_micro_batch at least 1": (
            grow.most_trials >= 0 and grow.most_micro_batch >= 1
        ),
        "race.noise must be at least 0 and below 1, finalists at least 1, turns and most_trials at least 0": (
            0 <= race.noise < 1 and race.finalists >= 1 and min(race.turns, race.most_trials) >= 0
        ),
        "tune.trials must be at least 0": profile.tune.trials >= 0,
        "certify.most_trials must be at least 0": certify.most_trials >= 0,
        "budget must be at least 0": min(profile.budget.trials, profile.budget.seconds) >= 0,
        "limits must be above 0 s, and no longer than a year": all(
            0 < seconds <= MOST_SECONDS for seconds in (limits.stall_s, limits.init_s, limits.wall_s, limits.build_s)
        ),
        "budget.seconds must be no longer than a year": profile.budget.seconds <= MOST_SECONDS,
        f"numbers of trials, steps and samples must be at most {_MOST:,}": max(
            *(steps.warmup + steps.most_timed for steps in all_steps),
            *(grow.most_trials, grow.most_micro_batch, race.most_trials, race.finalists, race.turns),
            *(profile.tune.trials, profile.tune.turns, certify.most_trials, profile.budget.trials),
        )
        <= _MOST,
    }
    for rule, holds in rules.items():
        if not holds:
            raise ValueError(rule)
