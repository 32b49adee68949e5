"""Start the ranks of a trial on a node, and wait until all of them are gone."""

from __future__ import annotations

import os
import select
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ..system import processes
from ..trial.job import RankJob
from ..trial.progress import Beat, Heartbeats
from ..trial.worker import environment, run_rank
from ..workload.protocol import Workload
from .monitor import CardWatch, HostWatch, Live, RankWatch


def start_ranks(
    job: RankJob, board: Heartbeats, workload: Workload | None, *, spawn: bool, bound: socket.socket | None = None
) -> list[tuple[int, int]]:
    """Pid and pidfd of every rank of this node, in the order of job.local_ranks. From the main thread only.

    bound: the socket of the store, where other nodes know its port already.
    """
    # Bound before the fork and inherited: no other process can take the port in between.
    # The ranks of another node than the first need none: they are told the port.
    store = bound or socket.create_server((job.master_address if job.is_whole else "127.0.0.1", 0))
    parent = os.getpid()
    if spawn:
        _job_file(job).write_text(job.to_json())
    started = []
    for slot in range(len(job.local_ranks)):
        pid, ending, kept = processes.fork_watched()
        if pid == 0:
            _child(job, slot, board, store, parent, workload, spawn, kept)
        started.append((pid, ending))
    store.close()
    return started


def _child(
    job: RankJob,
    slot: int,
    board: Heartbeats,
    store: socket.socket,
    parent: int,
    workload: Workload | None,
    spawn: bool,
    kept: int,
) -> NoReturn:
    """In the child: cut every tie to the zygote but `kept`, by which it sees our end, then live the rank's life."""
    code = 98
    try:
        os.setsid()
        processes.die_with_parent(parent)
        processes.prefer_for_oom_kill()
        rank = job.local_ranks[slot]
        os.environ.update(environment(job, slot, job.master_port or store.getsockname()[1]))
        log = os.open(f"{job.folder}/rank{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        serves = store.fileno() if rank == 0 else -1
        processes.redirect_and_close(log, {serves, board.fd, kept})
        os.chdir(job.scratch)
        if spawn:
            _become(slot, board.fd, serves, job, kept)
        code = run_rank(job, slot, board, store if rank == 0 else None, workload)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)  # no atexit, no buffers of the zygote


def _become(slot: int, heartbeat: int, store: int, job: RankJob, kept: int) -> NoReturn:
    """Give this process up for a new Python that inherits the descriptors."""
    for fd in (heartbeat, store, kept):
        if fd >= 0:
            os.set_inheritable(fd, True)
    words = [str(slot), str(heartbeat), str(store), str(_job_file(job))]
    os.execv(sys.executable, [sys.executable, "-m", "autods.trial.spawned", *words])


def _job_file(job: RankJob) -> Path:
    return Path(job.folder) / "job.json"


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
    strays = processes.kill_children(STRAYS_S)
    gone = time.monotonic()
    watch.board.close()
    processes.unlink_shared_memory(pids)
    processes.unlink_temporary(pids)
    swapped = processes.folder_bytes(Path(job.swap)) if job.swap else None
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
