"""Host memory while a job runs: what corroborates that a SIGKILL came from an OOM killer.

Kept by the process that watches the ranks, because a killed rank can say nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..cgroup import MemoryGroup, machine_oom_kills, memory_groups
from ..hardware import host_memory

_EVERY_S = 0.1


@dataclass(slots=True)
class HostWatch:
    """`begin` before the ranks start, `look` while they run, `report` when they are gone."""

    groups: tuple[MemoryGroup, ...]
    limit_bytes: int
    group_kills: int
    machine_kills: int
    least_free_bytes: int
    peak_rss_bytes: dict[int, int] = field(default_factory=dict)  # by rank
    _looked_s: float = 0.0

    @classmethod
    def begin(cls) -> HostWatch:
        """The counters as they stand, and the smallest limit on this process: the machine's memory or a cgroup's."""
        groups = memory_groups()
        memory = host_memory(groups)
        return cls(
            groups=groups,
            limit_bytes=memory.total_bytes,
            group_kills=_kills(groups),
            machine_kills=machine_oom_kills() or 0,
            least_free_bytes=memory.free_bytes,
        )

    def look(self, ranks: Iterable[tuple[int, int]]) -> None:
        """Note resident sizes of (rank, pid) and what is free, ten times a second at most."""
        now = time.monotonic()
        if now - self._looked_s < _EVERY_S:
            return
        self._looked_s = now
        self.least_free_bytes = min(self.least_free_bytes, host_memory(self.groups).free_bytes)
        for rank, pid in ranks:
            self.peak_rss_bytes[rank] = max(self.peak_rss_bytes.get(rank, 0), _rss(pid))

    def report(self) -> dict[str, Any]:
        """Plain values, for `failures.from_end`."""
        return {
            "group_kills": _kills(self.groups) - self.group_kills,
            "machine_kills": (machine_oom_kills() or 0) - self.machine_kills,
            "limit_bytes": self.limit_bytes,
            "least_free_bytes": min(self.least_free_bytes, host_memory(self.groups).free_bytes),
            "peak_rss_bytes": {str(rank): size for rank, size in self.peak_rss_bytes.items()},
        }


def _kills(groups: tuple[MemoryGroup, ...]) -> int:
    """The innermost group's: version 2 counts those below it there too."""
    return (groups[0].oom_kills() or 0) if groups else 0


def _rss(pid: int) -> int:
    """Resident private memory: file pages can be dropped, and shared ones are counted elsewhere. 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)
