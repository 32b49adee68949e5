"""What looks like a cause and is none: another program's death, a line that only has the words."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .exits import normal
from .patterns import SAYS_SO
from .story import Finding, Story

_KILLED_PROGRAM = re.compile(r"[Kk]illed process (\d+) \(([^)]*)\)")
_OURS = re.compile(r"python|^pt_|ray|torchrun|deepspeed|accelerate|train|worker|jupyter|ipykernel", re.IGNORECASE)


def credible(causes: Sequence[Finding], story: Story, exit_code: int | None) -> list[Finding]:
    """The causes that the rest of the log does not speak against."""
    ours = [one for one in causes if not _of_a_stranger(one, causes, story, exit_code)]
    return [one for one in ours if not _in_passing(one, ours)]


def _of_a_stranger(one: Finding, causes: Sequence[Finding], story: Story, exit_code: int | None) -> bool:
    """The kernel killed a program that is none of the run's, and the run ended by an exception of its own."""
    killed = _KILLED_PROGRAM.search(one.message.text) if one.row.weight == "decisive" else None
    if killed is None or _OURS.search(killed[2]) or int(killed[1]) in story.ranks.pids:
        return False
    ends = (exit_code, story.first_exit.code if story.first_exit is not None else None)
    return not any(end is not None and normal(end) == -9 for end in ends) and any(
        other.message.manner == "raised" for other in causes
    )


def _in_passing(one: Finding, causes: Sequence[Finding]) -> bool:
    """A plain line has the words for a full device, and an exception of the script's own ended the process after it."""
    message = one.message
    if one.row.kind != "out_of_memory" or one.row.tier != "device" or one.row.weight == "decisive":
        return False
    if message.manner == "raised" or message.type or message.prefix.level == "error" or SAYS_SO.match(message.text):
        return False
    if "tried to allocate" in message.text.lower():
        return False
    return any(
        other.message.manner == "raised"
        and other.row.kind in ("user_code", "config")
        and other.message.file == message.file
        and other.message.order > message.order
        and (other.rank == one.rank or None in (other.rank, one.rank))
        for other in causes
    )
