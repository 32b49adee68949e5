"""Start the ranks of a job on a node, and wait until all of them are gone."""

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
from typing import NoReturn

from ..system import processes
from ..trial.job import RankJob
from ..trial.progress import Beat, Heartbeats
from ..trial.worker import environment, run_rank
from ..workload.protocol import Workload
from .monitor import GpuMonitor, HostMonitor, RankMonitor, RunningRank
from .protocol import NodeReport

_POLL_MS = 20
_BEAT_EVERY_S = 0.2
_STRAYS_S = 2.0
_NO_EXIT_CODE = 98  # the rank could not even write its record; see `diagnosis.trial_outcome`


def run_ranks(
    job: RankJob,
    workload: Workload | None,
    *,
    agent: socket.socket,
    driver: int | None,
    send_beat: Callable[[Beat], None],
    spawn: bool = False,
    store: socket.socket | None = None,
    aborted: bool = False,
) -> NodeReport:
    """Run the job until every rank and every process that they started is gone.

    Any message from `agent`, and its end of file, ends the job.
    `driver` is a pidfd of the fit's process, or None when that lives on another node.
    `send_beat` gets the slowest rank's heartbeat, a few times a second.
    `spawn` and `store` are explained in `start_ranks`.
    `aborted` means that the job was ended before it began.
    """
    began = time.monotonic()
    gpus = GpuMonitor.begin(job.device, len(job.local_ranks))
    host = HostMonitor.begin()
    _make_folders(job)
    board = Heartbeats.create(len(job.local_ranks))
    monitor = RankMonitor(job, board, start_ranks(job, board, workload, spawn=spawn, store=store))
    pids = [rank.pid for rank in monitor.running.values()]
    if aborted:
        monitor.kill("aborted")
    _wait_until_gone(monitor, host, began, agent, driver, send_beat)
    processes.kill_children(_STRAYS_S)
    gone_at_s = time.monotonic()
    board.close()
    processes.unlink_shared_memory(pids)
    processes.unlink_temporary(pids)
    swap_bytes = processes.folder_bytes(Path(job.swap)) if job.swap else None
    remove_folders(job)
    return NodeReport(
        ranks=tuple(monitor.exits),
        gone_at_s=gone_at_s,
        host=host.summarize(),
        killed_because=monitor.killed_because,
        swap_bytes=swap_bytes,
        notes=tuple(gpus.check_freed()),
    )


def start_ranks(
    job: RankJob, board: Heartbeats, workload: Workload | None, *, spawn: bool, store: socket.socket | None = None
) -> dict[int, RunningRank]:
    """Start every rank of this node, and return the ranks by their pidfd. Call it from the main thread only.

    `spawn` starts new processes, because this one must not be forked.
    `store` is the rendezvous socket when other nodes know its port already.
    """
    # Bound before the fork and inherited: no other process can take the port in between.
    # Nodes other than the first get their own socket, which nobody uses: their ranks know the port of the first.
    store = store or socket.create_server((job.master_address if job.is_whole else "127.0.0.1", 0))
    parent, now = os.getpid(), time.monotonic()
    if spawn:
        _job_file(job).write_text(job.to_json())
    started = {}
    for slot, number in enumerate(job.local_ranks):
        pid, pidfd, keep = processes.fork_watched()
        if pid == 0:
            _live_as_rank(job, slot, board, store, parent, workload, spawn, keep)
        started[pidfd] = RunningRank(number, slot, pid, Beat("start", 0, now), now)
    store.close()
    return started


def _live_as_rank(
    job: RankJob,
    slot: int,
    board: Heartbeats,
    store: socket.socket,
    parent: int,
    workload: Workload | None,
    spawn: bool,
    keep: int,
) -> NoReturn:
    """In the child: cut every tie to the zygote, then run the rank. `keep` is a descriptor that ends with the rank."""
    code = _NO_EXIT_CODE
    try:
        os.setsid()
        processes.die_with_parent(parent)
        processes.prefer_for_oom_kill()
        rank = job.local_ranks[slot]
        os.environ.update(environment(job, slot, job.master_port or store.getsockname()[1]))
        log = os.open(f"{job.folder}/rank{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        store_fd = store.fileno() if rank == 0 else -1
        processes.redirect_and_close(log, {store_fd, board.fd, keep})
        os.chdir(job.scratch)
        if spawn:
            _exec_rank(slot, board.fd, store_fd, job, keep)
        code = run_rank(job, slot, board, store if rank == 0 else None, workload)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)  # no atexit, no buffers of the zygote


def _exec_rank(slot: int, board_fd: int, store_fd: int, job: RankJob, keep: int) -> NoReturn:
    """Replace this process by a new Python that inherits the descriptors."""
    for fd in (board_fd, store_fd, keep):
        if fd >= 0:
            os.set_inheritable(fd, True)
    words = [str(slot), str(board_fd), str(store_fd), str(_job_file(job))]
    os.execv(sys.executable, [sys.executable, "-m", "autods.trial.worker", *words])


def _job_file(job: RankJob) -> Path:
    return Path(job.folder) / "job.json"


def _wait_until_gone(
    monitor: RankMonitor,
    host: HostMonitor,
    began: float,
    agent: socket.socket,
    driver: int | None,
    send_beat: Callable[[Beat], None],
) -> None:
    """Return when the last rank has ended, by itself or by us."""
    poll = select.poll()
    for pidfd in monitor.running:
        poll.register(pidfd, select.POLLIN)
    poll.register(agent, select.POLLIN | select.POLLHUP)
    if driver is not None:
        poll.register(driver, select.POLLIN)
    beat_sent_s = 0.0
    while monitor.running:
        for fd, _ in poll.poll(_POLL_MS):
            if fd in monitor.running:
                poll.unregister(fd)
                monitor.collect_exit(fd)
            elif fd == driver:
                poll.unregister(fd)
                monitor.kill("the driver is gone")
            elif monitor.killed_s is None:
                monitor.kill("aborted")
        monitor.check(began)
        running = monitor.running.values()
        host.sample((rank.rank, rank.pid) for rank in running)
        if running and time.monotonic() - beat_sent_s > _BEAT_EVERY_S:
            beat_sent_s = time.monotonic()
            send_beat(min((rank.beat for rank in running), key=lambda beat: beat.at_s))


def _make_folders(job: RankJob) -> None:
    """Make the job's folders, without the files of an earlier attempt. Other nodes may have files in there."""
    if job.is_whole:
        shutil.rmtree(job.folder, ignore_errors=True)
    else:
        for rank in job.local_ranks:
            for kind in ("log", "json"):
                Path(job.folder, f"rank{rank}.{kind}").unlink(missing_ok=True)
    for folder in filter(None, (job.folder, job.scratch, job.swap)):
        Path(folder).mkdir(parents=True, exist_ok=True)


def remove_folders(job: RankJob) -> None:
    """Remove the working directory and the swap files of a job."""
    for folder in filter(None, (job.scratch, job.swap)):
        shutil.rmtree(folder, ignore_errors=True)
