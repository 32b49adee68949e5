"""The result of `autods doctor`: what was checked on this machine, and the commands that mend it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from .shown import Shown

CheckStatus = Literal["ok", "warning", "broken"]
Use = Literal["plan", "CPU ranks", "GPUs", "offload to the CPU", "NVMe"]  # what a machine may be ready for
_OFFLOAD: tuple[Use, ...] = ("offload to the CPU", "NVMe")
_TRIALS: tuple[Use, ...] = ("CPU ranks", "GPUs", *_OFFLOAD)
# What cannot be done where a line is broken, by its group and name, or by its group. Any other line stops all.
_STOPPED: Mapping[str, tuple[Use, ...]] = {
    "GPUs": ("GPUs",),
    "Software: compiler": ("plan", *_OFFLOAD),
    "Software: headers": _OFFLOAD,
    "Software: ninja": _OFFLOAD,
    "Software: Ray": _TRIALS,
    "Software: libaio": ("NVMe",),
    "DeepSpeed ops: cpu_adam": _OFFLOAD,
    "DeepSpeed ops: async_io": ("NVMe",),
    "DeepSpeed ops: fused_adam": (),  # some configs of users ask for it
    "Memory": _TRIALS,
    "Disk": _TRIALS,
    "Settings": _TRIALS,
    "NVMe": ("NVMe",),
    "Measured": _TRIALS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at.

    `warning`: something works slower or later than it could. `broken`: something that the machine may be wanted for
    does not work, see `stops`. `remedy` is the command or the setting that mends it.
    """

    group: str
    name: str
    status: CheckStatus
    result: str
    remedy: str = ""

    @classmethod
    def ok(cls, group: str, name: str, result: str, remedy: str = "") -> Check:
        return cls(group=group, name=name, status="ok", result=result, remedy=remedy)

    @classmethod
    def warning(cls, group: str, name: str, result: str, remedy: str = "") -> Check:
        return cls(group=group, name=name, status="warning", result=result, remedy=remedy)

    @classmethod
    def broken(cls, group: str, name: str, result: str, remedy: str = "") -> Check:
        return cls(group=group, name=name, status="broken", result=result, remedy=remedy)

    @property
    def stops(self) -> tuple[Use, ...]:
        """What this machine is not ready for because of this line."""
        if self.group == "GPUs" and self.name == "cards" and self.status != "ok":
            return ("GPUs",)
        if self.status != "broken":
            return ()
        return _STOPPED.get(f"{self.group}: {self.name}", _STOPPED.get(self.group, get_args(Use)))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Checkup(Shown):
    """All checks, in the order in which they are shown."""

    checks: tuple[Check, ...]

    @property
    def obstacles(self) -> Mapping[Use, str]:
        """What the machine is not ready for, each with the name of the first line that stops it."""
        stopped = [(use, check.name) for check in self.checks for use in check.stops]
        first = dict(reversed(stopped))
        return {use: first[use] for use in get_args(Use) if use in first}

    @property
    def ready_for(self) -> tuple[Use, ...]:
        """What the machine is ready for."""
        return tuple(use for use in get_args(Use) if use not in self.obstacles)

    @property
    def is_broken(self) -> bool:
        """Whether something fails that every user needs, or NVMe where a folder for it was named."""
        needed = {"plan", "CPU ranks"} | ({"NVMe"} if any(check.group == "NVMe" for check in self.checks) else set())
        unusable = any(check.status == "broken" and check.group == "GPUs" for check in self.checks)
        return unusable or bool(needed & self.obstacles.keys())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `autods doctor --json` prints them: the answer, and the checks that it rests on."""
        return {"ready_for": list(self.ready_for), "obstacles": dict(self.obstacles), **asdict(self)}
