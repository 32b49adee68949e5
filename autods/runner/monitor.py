"""Watch ranks, the host's memory and the GPUs while a job runs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ..diagnosis.evidence import HostUsage, LostBecause
from ..files import find_existing
from ..rank.job import Heartbeats, RankJob
from ..schema import read_known
from ..system import processes
from ..system.host import MemoryGroup, find_memory_groups, machine_oom_kills, read_host_memory
from ..system.waiting import MOST_BETWEEN_S
from ..types import Tier
from ..units import format_bytes
from .node_messages import RankExit, TierLevel
from .silence import RunningRank, Silence

_GRACE_S = 0.05  # after the first failure: time for the other ranks to report their errors
_STACKS_S = 2.0  # at most, for ranks that were asked for their stacks: on a busy machine they wait for the processor
_STOPPED_S = 0.5  # a rank that stays stopped (SIGSTOP) this long is lost
_KILL_AGAIN_S = 0.5
_LAST_PARTS = 6  # of 16 MiB, of the log of a run's rank, beside the first one and what follows them
_SHARED = Path("/dev/shm")


@dataclass(slots=True)
class RankMonitor:
    """Finds out how each rank of a node ends, and ends them all when one fails or a time limit is passed."""

    job: RankJob
    board: Heartbeats
    running: dict[int, RunningRank]  # by pidfd
    exits: list[RankExit] = field(default_factory=list)
    first_failure_s: float | None = None
    killed_s: float | None = None
    killed_because: str | None = None
    silence: Silence = field(init=False)
    _checked_s: float = field(default_factory=lambda: time.monotonic())
    _stopped_s: float = 0.0  # in which this process was stopped, as in a suspended job

    def __post_init__(self) -> None:
        self.silence = Silence(self.job)

    def collect_exit(self, pidfd: int) -> None:
        """Reap a rank that ended, and note how."""
        rank = self.running.pop(pidfd)
        _, status = os.waitpid(rank.pid, 0)
        os.close(pidfd)
        now, code = time.monotonic(), os.waitstatus_to_exitcode(status)
        beat, log = self.board.read(rank.slot), self.silence.log_of(rank)
        rank_exit = RankExit(
            rank=rank.rank,
            phase=beat.phase,
            step=beat.step,
            at_s=now,
            exit_code=code,
            killed_by_us=self.killed_s is not None and code == -signal.SIGKILL,
            forward_s=beat.forward_s,
        )
        with contextlib.suppress(OSError, ValueError):  # a rank that was killed wrote nothing
            written = json.loads(log.with_suffix(".json").read_text())
            rank_exit = read_known(RankExit, asdict(rank_exit) | written)
        self._split_log(log)
        if not rank_exit.succeeded and not rank_exit.error.types:  # thousands of ranks report to one process
            rank_exit = replace(rank_exit, log_tail=processes.read_tail(log))
        self.exits.append(rank_exit)
        if not rank_exit.succeeded and not rank_exit.killed_by_us and self.first_failure_s is None:
            self.first_failure_s = now

    def check(self, began: float) -> None:
        """Read heartbeats and find stopped ranks; end the job when a limit is passed.

        Time in which this process itself was stopped does not count: who suspends a job stops the ranks, too.
        """
        now, ranks = time.monotonic(), list(self.running.values())
        if (between_s := now - self._checked_s) > MOST_BETWEEN_S:
            self._stopped_s += between_s
            for rank in ranks:
                rank.changed_s, rank.stopped_s = now, None
        self._checked_s = now
        if self.killed_s is not None:
            if now - self.killed_s > _KILL_AGAIN_S:  # a rank between fork and setsid may have missed the signal
                self._kill_all()
            return
        if self.first_failure_s is not None:
            if now - self.first_failure_s >= _GRACE_S:
                self.kill("another rank failed")
            return
        for rank in ranks:
            self._split_log(self.silence.log_of(rank))
            beat = self.board.read(rank.slot)
            if beat != rank.beat and beat.at_s:
                rank.beat, rank.changed_s = beat, now
            rank.stopped_s = (rank.stopped_s or now) if processes.is_stopped(rank.pid) else None
            if rank.stopped_s is not None and now - rank.stopped_s > _STOPPED_S:
                self._give_up([rank], "stopped", _STOPPED_S)
                return
        if not ranks:
            return
        if (limit_s := self.silence.find_passed_limit(ranks, now)) is not None:
            self._give_up(ranks, "stuck", limit_s)
        elif now - began - self._stopped_s > self.job.wall_s:
            self._give_up(ranks, "wall limit", self.job.wall_s)

    def _split_log(self, log: Path) -> None:
        """Bound the size of a rank's log. A run's is the record of days, and a fit has those of many trials."""
        processes.split_log(log, last_parts=_LAST_PARTS if self.job.job == "run" else 0)

    def is_overdue(self) -> bool:
        """Whether ranks that were killed are still there: the kernel cannot end a process that waits for a device."""
        return self.killed_s is not None and time.monotonic() - self.killed_s > self.job.end_s

    def abandon(self) -> None:
        """Wait no longer for ranks that do not end."""
        for pidfd, rank in self.running.items():
            os.close(pidfd)
            beat = rank.beat
            self.exits.append(
                RankExit(rank=rank.rank, phase=beat.phase, step=beat.step, at_s=beat.at_s, killed_by_us=True)
            )
        self.running.clear()

    def kill(self, because: str) -> None:
        """End all ranks with their children."""
        self.killed_s, self.killed_because = time.monotonic(), because
        self._kill_all()

    def give_up_all(self) -> None:
        """End all ranks as stuck: those of every node wait for each other, as the driver has found."""
        if self.running and self.killed_s is None and self.first_failure_s is None:
            self._give_up(list(self.running.values()), "stuck", self.silence.awaits_s)

    def _give_up(self, suspects: Sequence[RunningRank], because: LostBecause, limit_s: float) -> None:
        """Ask all ranks for their stacks, note the suspects as lost, end all ranks.

        The diagnosis decides which suspect waits and which one makes the others wait.
        """
        self.first_failure_s = time.monotonic()
        for rank in self.running.values():
            with contextlib.suppress(OSError):
                os.kill(rank.pid, signal.SIGUSR1)  # faulthandler writes the stack into the log
        pids = [rank.pid for rank in self.running.values() if not processes.is_stopped(rank.pid)]
        time.sleep(_GRACE_S)
        until = time.monotonic() + _STACKS_S
        while any(processes.is_handling_signal(pid, signal.SIGUSR1) for pid in pids) and time.monotonic() < until:
            time.sleep(_GRACE_S)
        self.exits += [
            RankExit(
                rank=rank.rank,
                phase=rank.beat.phase,
                step=rank.beat.step,
                at_s=rank.beat.at_s,
                lost=because,
                lost_after_s=limit_s,
                log_tail=processes.read_tail(self.silence.log_of(rank)),
            )
            for rank in suspects
        ]
        self.kill(because)

    def _kill_all(self) -> None:
        for rank in self.running.values():
            for kill in (os.killpg, os.kill):  # the rank leads its session: its children are killed with it
                with contextlib.suppress(OSError):
                    kill(rank.pid, signal.SIGKILL)


_HOST_EVERY_S = 0.1


@dataclass(slots=True)
class HostMonitor:
    """`begin` before the ranks start, `sample` while they run, `summarize` when they are gone."""

    groups: tuple[MemoryGroup, ...]
    limit_bytes: int
    least_free_bytes: int
    kills: tuple[int, int]  # before, see `_count_kills`
    peak_rss_bytes: dict[str, int] = field(default_factory=dict)  # by rank
    _sampled_s: float = 0.0

    @classmethod
    def begin(cls) -> HostMonitor:
        """Read the counters, and the smallest limit on this process: the machine's memory or a cgroup's."""
        groups = find_memory_groups()
        memory = read_host_memory(groups)
        return cls(groups, memory.total_bytes, memory.free_bytes, _count_kills(groups))

    def sample(self, ranks: Iterable[RunningRank]) -> None:
        """Note the resident size of each rank and the free memory, ten times a second at most."""
        now = time.monotonic()
        if now - self._sampled_s < _HOST_EVERY_S:
            return
        self._sampled_s = now
        self.least_free_bytes = min(self.least_free_bytes, read_host_memory(self.groups).free_bytes)
        for rank in ranks:
            # Private bytes: pages of files can be dropped, and shared pages count apart.
            held, name = processes.status_bytes(rank.pid, "RssAnon").get("RssAnon", 0), str(rank.rank)
            self.peak_rss_bytes[name] = max(self.peak_rss_bytes.get(name, 0), held)

    def summarize(self) -> HostUsage:
        """The host's memory since `begin`."""
        group_kills, machine_kills = _count_kills(self.groups)
        return HostUsage(
            group_kills=group_kills - self.kills[0],
            machine_kills=machine_kills - self.kills[1],
            limit_bytes=self.limit_bytes,
            least_free_bytes=min(self.least_free_bytes, read_host_memory(self.groups).free_bytes),
            peak_rss_bytes=self.peak_rss_bytes,
        )


def read_tiers(groups: Sequence[MemoryGroup], swap: str | None) -> tuple[TierLevel, ...]:
    """Read the tiers of this node beside its devices: host memory, /dev/shm, and the disk of swap files if any."""
    memory = read_host_memory(groups)
    tiers = [TierLevel(tier="host", used_bytes=memory.total_bytes - memory.free_bytes, total_bytes=memory.total_bytes)]
    folders: dict[Tier, Path | None] = {"shm": _SHARED, "nvme": None if swap is None else Path(swap)}
    for tier, folder in folders.items():
        if folder is not None:
            with contextlib.suppress(OSError):
                usage = shutil.disk_usage(find_existing(folder))
                tiers.append(TierLevel(tier=tier, used_bytes=usage.total - usage.free, total_bytes=usage.total))
    return tuple(tiers)


def _count_kills(groups: tuple[MemoryGroup, ...]) -> tuple[int, int]:
    """OOM kills of the innermost group and of the machine. Version 2 counts those of the groups below it as well."""
    return (groups[0].oom_kills() or 0) if groups else 0, machine_oom_kills() or 0


_NOISE_BYTES = 64 * 2**20  # less than any process with a CUDA context holds
_FREED_S = 3.0  # a driver frees a dead process's memory a little after the process is gone
_GPU_EVERY_S = 0.05


def check_freed(
    before: Sequence[int], read_used: Callable[[], Sequence[int] | None], sleep: Callable[[float], None] = time.sleep
) -> list[str]:
    """A sentence for each GPU that does not return within some seconds to the bytes that it held `before` the ranks."""
    waited_s = 0.0
    while True:
        now = (read_used() or ()) if before else ()
        more = [held - old for held, old in zip(now, before, strict=False)]
        left = {index: size for index, size in enumerate(more) if size >= _NOISE_BYTES}
        if not left or waited_s >= _FREED_S:
            break
        sleep(_GPU_EVERY_S)
        waited_s += _GPU_EVERY_S
    return [
        f"GPU {index} still holds {format_bytes(size)} more than before this trial; the next measurements may be "
        "too large (nvidia-smi lists the processes that hold memory)"
        for index, size in left.items()
    ]
