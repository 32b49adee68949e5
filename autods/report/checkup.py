"""The result of `autods doctor`: what was checked on this machine, and the commands that mend it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

Status = Literal["ok", "warning", "broken"]
_MARKS: Mapping[Status, tuple[str, str]] = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "broken": ("✗", "red")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at.

    `warning`: something works slower or later than it could, or not at all where few need it. `broken`: a fit fails,
    or skips rungs. `remedy` is the command or the setting that mends it.
    """

    group: str
    name: str
    status: Status
    result: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """All checks, in the order in which they are shown."""

    checks: tuple[Check, ...]

    @property
    def is_broken(self) -> bool:
        """Whether something fails without a remedy."""
        return any(check.status == "broken" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """The checkup as plain values, for --json."""
        return asdict(self)


def print_checkup(checkup: Checkup, console: Console) -> None:
    """Print a line for each check, and below it the remedy."""
    group = ""
    for check in checkup.checks:
        if check.group != group:
            group = check.group
            console.print(Text(f"\n{group}" if check is not checkup.checks[0] else group, style="bold"))
        mark, style = _MARKS[check.status]
        line = Text.assemble((mark, style), f" {check.name}: {check.result}")
        console.print(Padding(line, (0, 0, 0, 2)))
        if check.remedy:
            console.print(Padding(Text(check.remedy, style="dim"), (0, 0, 0, 6)))
    counts = {status: sum(check.status == status for check in checkup.checks) for status in _MARKS}
    summary = f"\n{counts['broken']} broken, {counts['warning']} warnings, {counts['ok']} ok"
    console.print(
        Text(summary, style=_MARKS["broken" if counts["broken"] else "warning" if counts["warning"] else "ok"][1])
    )
