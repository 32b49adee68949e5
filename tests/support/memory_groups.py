"""Memory cgroups that tests make: a group with a limit of its own, below the one that the machine gives them."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from autods.system.host import find_memory_groups
from tests.support.watching import wait_for

# By version. Where the group may swap, the kernel swaps instead of killing.
_LIMITS = {1: "memory.limit_in_bytes", 2: "memory.max"}
_NO_SWAP = {1: ("memory.swappiness", "0"), 2: ("memory.swap.max", "0")}


@dataclass(frozen=True, slots=True)
class LimitedGroup:
    """A memory cgroup that a test has made."""

    folder: Path
    version: int

    def add(self, pids: Sequence[int]) -> None:
        """Put these processes into the group, with what they fork from now on."""
        for pid in pids:
            (self.folder / "cgroup.procs").write_text(str(pid))

    def limit(self, limit_bytes: int) -> None:
        """Set what its processes may hold together."""
        (self.folder / _LIMITS[self.version]).write_text(str(limit_bytes))

    def forbid_swap(self) -> None:
        """Keep its processes in memory. A kernel without swap has no file for that."""
        name, value = _NO_SWAP[self.version]
        if (self.folder / name).exists():
            (self.folder / name).write_text(value)

    def pids(self) -> list[int]:
        """The processes that are in it now."""
        return [int(pid) for pid in (self.folder / "cgroup.procs").read_text().split()]


@contextlib.contextmanager
def memory_group(*, limit_bytes: int, pids: Sequence[int] = ()) -> Iterator[LimitedGroup]:
    """Make a group with this limit, for these processes. Raises OSError where this machine lets nobody make one.

    At the end, what is still in it goes back to where it came from.
    """
    parents = find_memory_groups()
    if not parents:
        raise OSError("this machine has no memory cgroups")
    parent = parents[0]
    group = LimitedGroup(parent.folder / f"autods-test-{uuid.uuid4().hex}", parent.version)
    group.folder.mkdir()
    try:
        group.forbid_swap()
        group.limit(limit_bytes)
        group.add(pids)
        yield group
    finally:
        wait_for(lambda: _is_removed(group), 20)


def _is_removed(group: LimitedGroup) -> bool:
    """A group is busy until its processes are in the one above, and the kernel has done with those that died in it."""
    with contextlib.suppress(OSError):
        for pid in group.pids():
            with contextlib.suppress(ProcessLookupError):
                (group.folder.parent / "cgroup.procs").write_text(str(pid))
        group.folder.rmdir()
    return not group.folder.exists()
