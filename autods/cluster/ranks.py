"""Start the ranks of one job: by fork, or as processes of their own where a fork would not survive."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from .. import procs
from ..trial.heartbeat import Heartbeats
from ..trial.rank import environment, run_rank
from ..trial.spec import RankJob
from ..workload import Workload


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
        pid, ending, kept = procs.watched_fork()
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
        procs.die_with_parent(parent)
        procs.first_to_be_killed()
        rank = job.local_ranks[slot]
        os.environ.update(environment(job, slot, job.master_port or store.getsockname()[1]))
        log = os.open(f"{job.folder}/rank{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        serves = store.fileno() if rank == 0 else -1
        procs.redirect_and_close(log, {serves, board.fd, kept})
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
