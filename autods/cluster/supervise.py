"""Fork the ranks of one job, watch them, end them all, and say how each ended.

Runs in the zygote's only thread: PDEATHSIG follows the thread that forked, and a fork of a threaded process may hang.
"""

from __future__ import annotations

import select
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import procs
from ..trial.heartbeat import Beat, Heartbeats
from ..trial.spec import RankJob
from ..workload import Workload
from .card_watch import CardWatch
from .host_watch import HostWatch
from .rank_watch import Live, RankWatch
from .ranks import start_ranks

TICK_S = 0.02
STRAYS_S = 2.0


def supervise(
    job: RankJob,
    workload: Workload | None,
    *,
    owner: socket.socket,
    driver: int | None,
    told: Callable[[Beat], None],
    spawn: bool = False,
    bound: socket.socket | None = None,
    aborted: bool = False,
) -> dict[str, Any]:
    """Run the job to its end: every rank gone, every stray gone.

    owner: the connection to the node actor; its end of file, or a word on it, ends the job. driver: a pidfd of the
    driver, if it lives on this node. told: the slowest rank's heartbeat, a few times a second. spawn: start
    ranks as new processes, because this one must not be forked. bound: see `start_ranks`. aborted: the word that ends
    the job is there already.
    """
    began = time.monotonic()
    cards = CardWatch.begin(job.device, len(job.local_ranks))
    watch = _started(job, workload, spawn, bound)
    pids = [live.pid for live in watch.live.values()]
    if aborted:
        watch.kill("aborted")
    _until_gone(watch, began, owner, driver, told)
    strays = procs.kill_children(STRAYS_S)
    gone = time.monotonic()
    watch.board.close()
    procs.unlink_shared_memory(pids)
    procs.unlink_temporary(pids)
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
        "said": cards.said(),
    }


def _started(job: RankJob, workload: Workload | None, spawn: bool, bound: socket.socket | None) -> RankWatch:
    """The job's folders made and its ranks running."""
    _clear(job)
    Path(job.folder).mkdir(parents=True, exist_ok=True)
    for folder in filter(None, (job.scratch, job.swap)):
        Path(folder).mkdir(parents=True, exist_ok=True)
    board = Heartbeats.of(len(job.local_ranks))
    host = HostWatch.begin()
    now = time.monotonic()
    started = start_ranks(job, board, workload, spawn=spawn, bound=bound)
    live = {
        pidfd: Live(job.local_ranks[slot], slot, pid, Beat("start", 0, now), now)
        for slot, (pid, pidfd) in enumerate(started)
    }
    return RankWatch(job, board, live, host)


def _until_gone(
    watch: RankWatch, began: float, owner: socket.socket, driver: int | None, told: Callable[[Beat], None]
) -> None:
    """RankWatch until the last rank is gone, by itself or by us."""
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
                watch.ended(fd)
            elif fd == driver:
                poll.unregister(fd)
                watch.kill("the driver is gone")
            elif watch.killed_s is None:
                watch.kill("aborted")
        watch.look(began)
        watch.host.look((live.rank, live.pid) for live in watch.live.values())
        if time.monotonic() - last_told > 0.2 and watch.live:
            last_told = time.monotonic()
            told(min((live.beat for live in watch.live.values()), key=lambda beat: beat.at_s))


def _clear(job: RankJob) -> None:
    """What an earlier attempt left must not speak for this one. Other nodes may have files of theirs in there."""
    if job.is_whole:
        shutil.rmtree(job.folder, ignore_errors=True)
        return
    for rank in job.local_ranks:
        for kind in ("log", "json"):
            Path(job.folder, f"rank{rank}.{kind}").unlink(missing_ok=True)


def remove_folders(job: RankJob) -> None:
    """The working directory and the swap files of a job."""
    for folder in filter(None, (job.scratch, job.swap)):
        shutil.rmtree(folder, ignore_errors=True)
