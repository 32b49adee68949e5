"""Fork the ranks of one job, watch them, end them all, and say how each ended.

Runs in the zygote's only thread: PDEATHSIG follows the thread that forked, and a fork of a threaded process may hang.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..trial.heartbeat import Beat, Heartbeats
from ..trial.spec import RankJob
from ..workload import Workload
from . import procs
from .host_watch import HostWatch
from .ranks import start_ranks

TICK_S = 0.02
GRACE_S = 0.05  # after the first failure: time for the others to say what they saw
STOPPED_S = 0.5  # a rank that stays stopped (SIGSTOP) this long is lost
STRAYS_S = 2.0

# Phases that may build ops, load weights, read a data set or write a checkpoint: the longer limit holds.
_SLOW_PHASES = ("start", "rendezvous", "build", "init", "save", "load")


@dataclass(slots=True)
class Live:
    """One running rank."""

    rank: int
    slot: int
    pid: int
    pidfd: int
    beat: Beat
    changed_s: float
    stopped_s: float | None = None


@dataclass(slots=True)
class Watch:
    """What the watcher knows while a job runs; `ends` is what it reports."""

    job: RankJob
    board: Heartbeats
    live: dict[int, Live]  # by pidfd
    host: HostWatch
    ends: list[dict[str, Any]] = field(default_factory=list)
    first_failure_s: float | None = None
    killed_s: float | None = None
    why_killed: str | None = None


def supervise(
    job: RankJob,
    workload: Workload | None,
    *,
    owner: socket.socket,
    driver: int | None,
    told: Callable[[Beat], None],
    spawn: bool = False,
) -> dict[str, Any]:
    """Run the job to its end: every rank gone, every stray gone.

    owner: the connection to the node actor; its end of file, or a word on it, ends the job. driver: a pidfd of the
    driver, if it lives on this node. told: the slowest rank's heartbeat, a few times a second. spawn: start
    ranks as new processes, because this one must not be forked.
    """
    began = time.monotonic()
    watch = _started(job, workload, spawn)
    pids = [live.pid for live in watch.live.values()]
    _until_gone(watch, began, owner, driver, told)
    strays = procs.kill_children(STRAYS_S)
    gone = time.monotonic()
    watch.board.close()
    procs.unlink_shared_memory(pids)
    swapped = procs.folder_bytes(Path(job.swap)) if job.swap else None
    remove_folders(job)
    return {
        "ends": watch.ends,
        "wall_s": gone - began,
        "gone_at_s": gone,
        "strays": strays,
        "why_killed": watch.why_killed,
        "swap_bytes": swapped,
        "host": watch.host.report(),
    }


def _started(job: RankJob, workload: Workload | None, spawn: bool) -> Watch:
    """The job's folders made and its ranks running."""
    shutil.rmtree(job.folder, ignore_errors=True)  # what an earlier attempt left must not speak for this one
    Path(job.folder).mkdir(parents=True)
    for folder in filter(None, (job.scratch, job.swap)):
        Path(folder).mkdir(parents=True, exist_ok=True)
    board = Heartbeats.of(len(job.local_ranks))
    host = HostWatch.begin()
    now = time.monotonic()
    started = start_ranks(job, board, workload, spawn=spawn)
    live = {
        pidfd: Live(job.local_ranks[slot], slot, pid, pidfd, Beat("start", 0, now), now)
        for slot, (pid, pidfd) in enumerate(started)
    }
    return Watch(job, board, live, host)


def _until_gone(
    watch: Watch, began: float, owner: socket.socket, driver: int | None, told: Callable[[Beat], None]
) -> None:
    """Watch until the last rank is gone, by itself or by us."""
    poll = select.poll()
    for pidfd in watch.live:
        poll.register(pidfd, select.POLLIN)
    poll.register(owner, select.POLLIN | select.POLLHUP)
    if driver is not None:
        poll.register(driver, select.POLLIN)
    last_told = 0.0
    while watch.live:
        for fd, _ in poll.poll(TICK_S * 1000):
            if fd in watch.live:
                poll.unregister(fd)
                _ended(watch, fd)
            elif fd == driver:
                poll.unregister(fd)
                _kill(watch, "the driver is gone")
            elif watch.killed_s is None:
                _kill(watch, "aborted")
        _look(watch, began)
        watch.host.look((live.rank, live.pid) for live in watch.live.values())
        if time.monotonic() - last_told > 0.2 and watch.live:
            last_told = time.monotonic()
            told(min((live.beat for live in watch.live.values()), key=lambda beat: beat.at_s))


def remove_folders(job: RankJob) -> None:
    """The working directory and the swap files of a job."""
    for folder in filter(None, (job.scratch, job.swap)):
        shutil.rmtree(folder, ignore_errors=True)


def _ended(watch: Watch, pidfd: int) -> None:
    """A rank is gone: reap it and note how."""
    live = watch.live.pop(pidfd)
    _, status = os.waitpid(live.pid, 0)
    os.close(pidfd)
    now = time.monotonic()
    record = _record(watch.job, live.rank)
    code = os.waitstatus_to_exitcode(status)
    by_us = watch.killed_s is not None and code == -signal.SIGKILL
    at_s = (record or {}).get("at_s", now)
    end = _end(watch, live, watch.board.read(live.slot), exit=code, killed_by_us=by_us, record=record, at_s=at_s)
    watch.ends.append(end)
    failed = code != 0 or record is None or not record["ok"]
    if failed and not by_us and watch.first_failure_s is None:
        watch.first_failure_s = now


def _record(job: RankJob, rank: int) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads((Path(job.folder) / f"rank{rank}.json").read_text())
    except (OSError, ValueError):
        return None
    return record


def _look(watch: Watch, began: float) -> None:
    """Heartbeats, stopped ranks and limits; ends the job when one is passed."""
    now = time.monotonic()
    if watch.killed_s is not None:
        if now - watch.killed_s > 0.5:  # a rank between fork and setsid may have missed it
            _signal_all(watch, signal.SIGKILL)
        return
    if watch.first_failure_s is not None:
        if now - watch.first_failure_s >= GRACE_S:
            _kill(watch, "another rank failed")
        return
    for live in watch.live.values():
        beat = watch.board.read(live.slot)
        if beat != live.beat and beat.at_s:
            live.beat, live.changed_s = beat, now
        live.stopped_s = (live.stopped_s or now) if procs.is_stopped(live.pid) else None
        if live.stopped_s is not None and now - live.stopped_s > STOPPED_S:
            _lost(watch, [live], "stopped")
            return
    limit = watch.job.init_s if any(x.beat.phase in _SLOW_PHASES for x in watch.live.values()) else watch.job.stall_s
    if watch.live and all(now - live.changed_s > limit for live in watch.live.values()):
        _lost(watch, list(watch.live.values()), "stuck")
    elif watch.live and now - began > watch.job.wall_s:
        _lost(watch, list(watch.live.values()), "wall limit")


def _lost(watch: Watch, suspects: list[Live], how: str) -> None:
    """Ranks that will not end by themselves: ask all for their stacks, note the suspects, end all.

    Who of them waits and who lets the others wait is for the verdict to say.
    """
    watch.first_failure_s = time.monotonic()
    _signal_all(watch, signal.SIGUSR1)
    time.sleep(GRACE_S)  # faulthandler writes into the log
    watch.ends += [_end(watch, live, live.beat, exit=None, lost=how) for live in suspects]
    _kill(watch, how)


def _end(watch: Watch, live: Live, beat: Beat, **said: Any) -> dict[str, Any]:
    """What is reported of a rank."""
    return {
        "rank": live.rank,
        "killed_by_us": False,
        "record": None,
        "phase": beat.phase,
        "step": beat.step,
        "at_s": beat.at_s,
        "log_tail": procs.tail(Path(watch.job.folder) / f"rank{live.rank}.log"),
        **said,
    }


def _kill(watch: Watch, why: str) -> None:
    watch.killed_s, watch.why_killed = time.monotonic(), why
    _signal_all(watch, signal.SIGKILL)


def _signal_all(watch: Watch, number: signal.Signals) -> None:
    for live in watch.live.values():
        if number == signal.SIGKILL:
            with contextlib.suppress(OSError):
                os.killpg(live.pid, number)  # the rank is the leader of its session: its children go with it
        with contextlib.suppress(OSError):
            os.kill(live.pid, number)
