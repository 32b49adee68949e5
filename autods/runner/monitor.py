"""Watch ranks, the host and the cards while a trial runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..system import processes
from ..system.gpus import read_used_bytes
from ..system.host import MemoryGroup, find_memory_groups, machine_oom_kills, read_host_memory
from ..trial.job import RankJob
from ..trial.progress import Beat, Heartbeats
from ..types import Device
from ..units import format_bytes

GRACE_S = 0.05  # after the first failure: time for the others to say what they saw
STACKS_S = 2.0  # at most, for ranks that were asked where they are: a busy machine lets them wait for their turn
STOPPED_S = 0.5  # a rank that stays stopped (SIGSTOP) this long is lost
# Phases that may build ops, load weights, read a data set or write a checkpoint: the longer limit holds.
_SLOW_PHASES = ("start", "rendezvous", "build", "init", "save", "load")


@dataclass(slots=True)
class Live:
    """One running rank."""

    rank: int
    slot: int
    pid: int
    beat: Beat
    changed_s: float
    stopped_s: float | None = None


@dataclass(slots=True)
class RankWatch:
    """`look` while they run, `ended` when one of them is gone; `ends` is what is reported of each."""

    job: RankJob
    board: Heartbeats
    live: dict[int, Live]  # by pidfd
    host: HostWatch
    ends: list[dict[str, Any]] = field(default_factory=list)
    first_failure_s: float | None = None
    killed_s: float | None = None
    why_killed: str | None = None

    def ended(self, pidfd: int) -> None:
        """A rank is gone: reap it and note how."""
        live = self.live.pop(pidfd)
        _, status = os.waitpid(live.pid, 0)
        os.close(pidfd)
        now = time.monotonic()
        processes.shorten_log(self._log_of(live))
        record = _record(self.job, live.rank)
        code = os.waitstatus_to_exitcode(status)
        by_us = self.killed_s is not None and code == -signal.SIGKILL
        at_s = (record or {}).get("at_s", now)
        end = self._end(live, self.board.read(live.slot), exit=code, killed_by_us=by_us, record=record, at_s=at_s)
        self.ends.append(end)
        failed = code != 0 or record is None or not record["ok"]
        if failed and not by_us and self.first_failure_s is None:
            self.first_failure_s = now

    def look(self, began: float) -> None:
        """Heartbeats, stopped ranks and limits; ends the job when one is passed."""
        now = time.monotonic()
        if self.killed_s is not None:
            if now - self.killed_s > 0.5:  # a rank between fork and setsid may have missed it
                self._signal_all(signal.SIGKILL)
            return
        if self.first_failure_s is not None:
            if now - self.first_failure_s >= GRACE_S:
                self.kill("another rank failed")
            return
        for live in self.live.values():
            processes.shorten_log(self._log_of(live))
            beat = self.board.read(live.slot)
            if beat != live.beat and beat.at_s:
                live.beat, live.changed_s = beat, now
            live.stopped_s = (live.stopped_s or now) if processes.is_stopped(live.pid) else None
            if live.stopped_s is not None and now - live.stopped_s > STOPPED_S:
                self._lost([live], "stopped")
                return
        limit = self.job.init_s if any(x.beat.phase in _SLOW_PHASES for x in self.live.values()) else self.job.stall_s
        if self.live and all(now - live.changed_s > limit for live in self.live.values()):
            self._lost(list(self.live.values()), "stuck")
        elif self.live and now - began > self.job.wall_s:
            self._lost(list(self.live.values()), "wall limit")

    def kill(self, why: str) -> None:
        """End all of them with their children."""
        self.killed_s, self.why_killed = time.monotonic(), why
        self._signal_all(signal.SIGKILL)

    def _lost(self, suspects: list[Live], how: str) -> None:
        """Ranks that will not end by themselves: ask all for their stacks, note the suspects, end all.

        Who of them waits and who lets the others wait is for the verdict to say.
        """
        self.first_failure_s = time.monotonic()
        self._signal_all(signal.SIGUSR1)
        self._hear_stacks()
        self.ends += [self._end(live, live.beat, exit=None, lost=how) for live in suspects]
        self.kill(how)

    def _hear_stacks(self) -> None:
        """Until faulthandler has written them into the logs; a rank that is stopped writes none."""
        asked = [live.pid for live in self.live.values() if not processes.is_stopped(live.pid)]
        time.sleep(GRACE_S)
        until = time.monotonic() + STACKS_S
        while any(processes.is_handling_signal(pid, signal.SIGUSR1) for pid in asked) and time.monotonic() < until:
            time.sleep(GRACE_S)

    def _end(self, live: Live, beat: Beat, *, record: dict[str, Any] | None = None, **said: Any) -> dict[str, Any]:
        """What is reported of a rank. The end of its log only where its record does not speak for it: thousands of
        ranks report to one driver."""
        spoke = record is not None and bool(said["exit"] == 0 if record["ok"] else record["error"]["types"])
        return {
            "rank": live.rank,
            "killed_by_us": False,
            "record": record,
            "phase": beat.phase,
            "step": beat.step,
            "at_s": beat.at_s,
            "log_tail": "" if spoke else processes.read_tail(self._log_of(live)),
            **said,
        }

    def _log_of(self, live: Live) -> Path:
        return Path(self.job.folder) / f"rank{live.rank}.log"

    def _signal_all(self, number: signal.Signals) -> None:
        for live in self.live.values():
            if number == signal.SIGKILL:
                with contextlib.suppress(OSError):
                    os.killpg(live.pid, number)  # the rank is the leader of its session: its children go with it
            with contextlib.suppress(OSError):
                os.kill(live.pid, number)


def _record(job: RankJob, rank: int) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads((Path(job.folder) / f"rank{rank}.json").read_text())
    except (OSError, ValueError):
        return None
    return record


_HOST_EVERY_S = 0.1


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
        groups = find_memory_groups()
        memory = read_host_memory(groups)
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
        if now - self._looked_s < _HOST_EVERY_S:
            return
        self._looked_s = now
        self.least_free_bytes = min(self.least_free_bytes, read_host_memory(self.groups).free_bytes)
        for rank, pid in ranks:
            self.peak_rss_bytes[rank] = max(self.peak_rss_bytes.get(rank, 0), _rss(pid))

    def report(self) -> dict[str, Any]:
        """Plain values, for `failures.from_end`."""
        return {
            "group_kills": _kills(self.groups) - self.group_kills,
            "machine_kills": (machine_oom_kills() or 0) - self.machine_kills,
            "limit_bytes": self.limit_bytes,
            "least_free_bytes": min(self.least_free_bytes, read_host_memory(self.groups).free_bytes),
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


Look = Callable[[], "tuple[int, ...] | None"]
_NOISE_BYTES = 64 * 2**20  # less than any process with a context on the card
_WAIT_S = 3.0  # a driver frees a dead process's memory a little after the process is gone
_CARD_EVERY_S = 0.05


def _used() -> tuple[int, ...] | None:
    return read_used_bytes(os.environ.get("CUDA_VISIBLE_DEVICES"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CardWatch:
    """`begin` before the ranks start, `said` when they are gone. ranks: of this node, one a card, from the first on."""

    before: tuple[int, ...] | None
    ranks: int
    look: Look = _used

    @classmethod
    def begin(cls, device: Device, ranks: int, look: Look = _used) -> CardWatch:
        """What is held of each card now; CPU ranks have none to look at."""
        return cls(before=look() if device == "cuda" else None, ranks=ranks, look=look)

    def said(self, wait: Callable[[float], None] = time.sleep) -> list[str]:
        """A sentence for each card that did not come back to what it held, after some time for it."""
        if self.before is None:
            return []
        left, waited = tuple(self._left()), 0.0
        while left and waited < _WAIT_S:
            wait(_CARD_EVERY_S)
            waited += _CARD_EVERY_S
            left = tuple(self._left())
        return [
            f"card {index} did not come back after this trial: {format_bytes(more)} more than before are held; what is "
            "measured next may be too large (nvidia-smi shows by whom)"
            for index, more in left
        ]

    def _left(self) -> Iterator[tuple[int, int]]:
        """Place of a card, and what it holds more than before."""
        now = self.look() or ()
        for index, (held, before) in enumerate(zip(now[: self.ranks], self.before or (), strict=False)):
            if held - before >= _NOISE_BYTES:
                yield index, held - before
