"""The result of `autods doctor`: what was checked on this machine, and the commands that mend it."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from .results.doctor import CheckStatus, Checkup

_MARKS: Mapping[CheckStatus, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "warning": ("!", "yellow"),
    "broken": ("✗", "red"),
}


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
