"""The result of `autods doctor`: what was checked on this machine, and the commands that mend it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .shown import Shown

CheckStatus = Literal["ok", "warning", "broken"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at.

    `warning`: something works slower or later than it could, or not at all where few need it. `broken`: a fit fails,
    or skips rungs. `remedy` is the command or the setting that mends it.
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


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Checkup(Shown):
    """All checks, in the order in which they are shown."""

    checks: tuple[Check, ...]

    @property
    def is_broken(self) -> bool:
        """Whether something fails without a remedy."""
        return any(check.status == "broken" for check in self.checks)
