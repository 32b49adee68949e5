"""The memory cgroup of this process, version 1 or 2: its limit, what is left of it, and how often its killer struck.

A container's limit is such a cgroup. Nothing here fails: what cannot be read is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_NONE = 2**60  # version 1 says "no limit" by a number near 2^63


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGroup:
    """One memory cgroup. Files are read anew at each call."""

    folder: Path
    version: int

    def limit_bytes(self) -> int | None:
        """What its processes may hold together; None when nothing limits them."""
        limit = _number(self.folder / ("memory.max" if self.version == 2 else "memory.limit_in_bytes"))
        return limit if limit is not None and limit < _NONE else None

    def free_bytes(self) -> int | None:
        """What is left of the limit; file pages that can be dropped at once count as free."""
        limit = self.limit_bytes()
        used = _number(self.folder / ("memory.current" if self.version == 2 else "memory.usage_in_bytes"))
        if limit is None or used is None:
            return None
        cached = _field(self.folder / "memory.stat", "inactive_file" if self.version == 2 else "total_inactive_file")
        return max(0, limit - used + (cached or 0))

    def oom_kills(self) -> int | None:
        """Processes that the killer has ended in it so far; with version 2 in the groups below it too."""
        return _field(self.folder / ("memory.events" if self.version == 2 else "memory.oom_control"), "oom_kill")


def memory_groups(
    of: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> tuple[MemoryGroup, ...]:
    """The group that limits this process and those above it, innermost first; none where there is no such cgroup."""
    try:
        lines = of.read_text().splitlines()
    except OSError:
        return ()
    paths = dict(_controllers(line) for line in lines if line.count(":") >= 2)
    if "memory" in paths:
        return _up(mount / "memory", paths["memory"], "memory.limit_in_bytes", version=1)
    if "" in paths:
        return _up(mount, paths[""], "memory.max", version=2)
    return ()


def machine_oom_kills() -> int | None:
    """Processes that any OOM killer of this kernel has ended since it started."""
    return _field(Path("/proc/vmstat"), "oom_kill")


def _controllers(line: str) -> tuple[str, str]:
    """'4:memory:/a/b' → ('memory', '/a/b'); '0::/a' → ('', '/a')."""
    _, names, path = line.split(":", 2)
    return ("memory" if "memory" in names.split(",") else names), path


def _up(mount: Path, path: str, file: str, *, version: int) -> tuple[MemoryGroup, ...]:
    inner = mount / path.lstrip("/")
    # In a container the path can be the host's, while what is mounted is the container's own group.
    if not (inner / file).exists():
        inner = mount
    folders = [inner, *(folder for folder in inner.parents if folder == mount or mount in folder.parents)]
    return tuple(MemoryGroup(folder=folder, version=version) for folder in folders if (folder / file).exists())


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _field(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    found = next((words[1] for line in lines if (words := line.split()) and words[0] == name and len(words) == 2), None)
    return int(found) if found is not None and found.isdigit() else None
