"""Fork the ranks of a node: from the zygote, or from a process that has built their model once.

The zygote forks the builder, which builds the model of all trials as rank 0 would, with rank 0's seed: DeepSpeed gives
its weights to the other ranks anyway. Ranks are forked from the builder and share its pages until they write to them.
A builder whose ranks would differ from ranks that build the model themselves ends with the reason. It serves a socket:
it reads a line for each job and answers each with one line of JSON.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import _exit  # the workload may replace it
from pathlib import Path
from typing import Any, NoReturn

from ..config.deepspeed import count_sharers
from ..devices import find_device
from ..diagnosis.evidence import RESULT_UNWRITTEN_EXIT
from ..plain_text import read_text
from ..rank import preload
from ..rank.job import Heartbeats, RankJob
from ..rank.memory import Baseline, make_meter
from ..rank.shared_build import build_for_ranks
from ..rank.worker import run_rank
from ..system import processes
from ..types import Exam, WorkloadSource
from ..workload.protocol import Workload
from .environment import choose_cores, rank_environment

_ADOPTED_S = 10.0  # a rank's parent ends at once; the zygote is its next
_END_S, _REAP_EVERY_S = 30.0, 0.005  # the kernel frees the pages of a large model in seconds
_MESSAGE_BYTES = 1 << 16


def may_share(source: WorkloadSource, exam: Exam | None, config: Mapping[str, Any]) -> bool:
    """Whether the ranks of such a trial may get one model that was built for all.

    A script builds by itself, `--zero-init` builds parts, and ranks that split layers start from weights of their own.
    The winner's exam measures the host as a training run fills it, so its ranks build the model themselves.
    """
    is_whole = not source.form.runs_as_main and not source.zero_init and count_sharers(config) == 1
    return is_whole and exam != "worst_case"


def live_as_rank(
    job: RankJob,
    slot: int,
    *,
    board: Heartbeats,
    store: socket.socket | None,
    port: int,
    parent: int,
    workload: Workload | None,
    keep: int = -1,
    spawn: bool = False,
    baseline: Baseline | None = None,
) -> NoReturn:
    """In a forked child of the zygote `parent`: cut every tie to it, then run the rank.

    `keep` is a descriptor that ends with the rank. With `spawn` the rank is a new Python. `port` is that of the
    rendezvous, which rank 0 of several nodes serves on `store`.
    """
    code = RESULT_UNWRITTEN_EXIT
    try:
        os.setsid()
        processes.die_with_parent(parent)
        processes.prefer_for_oom_kill()
        if job.job != "run":  # a trial may crash: its core would be as large as its memory, and lie beside the script
            processes.forbid_core_dump()
        rank = job.local_ranks[slot]
        os.environ.update(rank_environment(job, slot, port))
        if cores := choose_cores(job, slot):
            os.sched_setaffinity(0, cores)
        log = os.open(f"{job.folder}/rank{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        store = store if rank == 0 else None
        store_fd = -1 if store is None else store.fileno()
        descriptors = {board.fd, store_fd, keep}
        processes.redirect_and_close(log, descriptors)
        os.chdir(job.scratch)
        if spawn:  # a new Python, which inherits the descriptors
            for fd in descriptors - {-1}:
                os.set_inheritable(fd, True)
            words = [str(slot), str(board.fd), str(store_fd), f"{job.scratch}/job.json"]
            os.execv(sys.executable, [*processes.python_command("autods.rank.worker"), *words])
        code = run_rank(job, slot, board, store, workload, baseline)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        _exit(code)  # no atexit, no buffers of the zygote


@dataclass(slots=True)
class Builder:
    """The process that builds a model once, as the zygote sees it.

    `device_bytes` is what the build took of the memory of a CPU rank; 0 for other devices.
    """

    source: WorkloadSource
    seed: int
    pid: int
    connection: socket.socket
    device_bytes: int = 0

    @classmethod
    def start(cls, job: RankJob, workload: Workload) -> Builder:
        """Fork the process. `read_end` tells how its build ended, once its connection can be read."""
        parent, (connection, peer) = os.getpid(), socket.socketpair()
        with peer:
            pid = os.fork()
            if pid == 0:
                _live_as_builder(job, workload, peer, parent)
        return cls(job.source, job.seed, pid, connection)

    def read_end(self) -> str | None:
        """Return why each rank has to build the model itself; None if it is built."""
        answer = self._read()
        self.device_bytes = int(answer.get("device_bytes", 0))
        return None if "device_bytes" in answer else str(answer.get("apart", "its build ended the process"))

    def has_room(self, job: RankJob) -> bool:
        """Whether the build fits into the memory limit of the job's ranks; else they run out of it, as they should."""
        return job.limit_bytes is None or self.device_bytes <= job.limit_bytes

    def fork_ranks(self, job: RankJob, board: Heartbeats, store: socket.socket | None, port: int) -> list[int] | None:
        """Fork the ranks of this node, which become children of this process; None if the builder is gone."""
        file = Path(job.scratch, "job.json")  # other nodes have the folder too, not the scratch
        file.write_text(job.to_json())
        descriptors = [board.fd, *([] if store is None else [store.fileno()])]
        with contextlib.suppress(OSError):
            socket.send_fds(self.connection, [json.dumps([str(file), port]).encode()], descriptors)
        pids = self._read().get("pids")
        return pids if isinstance(pids, list) else None

    def end(self) -> None:
        """End the process and wait for it."""
        self.connection.close()
        until = time.monotonic() + _END_S
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
            while os.waitpid(self.pid, os.WNOHANG)[0] == 0 and time.monotonic() < until:
                time.sleep(_REAP_EVERY_S)

    def _read(self) -> dict[str, Any]:
        """Read one answer; {} once the process is gone."""
        data = b""
        with contextlib.suppress(OSError):
            while not data.endswith(b"\n") and (more := self.connection.recv(_MESSAGE_BYTES)):
                data += more
        return dict(json.loads(data)) if data.endswith(b"\n") else {}


def _live_as_builder(job: RankJob, workload: Workload, connection: socket.socket, zygote: int) -> NoReturn:
    """In the child: build the model or say why not, then fork the ranks of each job until the zygote is gone."""
    try:
        os.setsid()
        processes.die_with_parent(zygote)
        processes.prefer_for_oom_kill()
        Path("/proc/self/comm").write_text("autods-builder")
        log = os.open(f"{job.folder}/rank{job.local_ranks[0]}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        processes.redirect_and_close(log, {connection.fileno()})
        os.chdir(job.scratch)

        def refuse(reason: str) -> NoReturn:
            _answer(connection, {"apart": reason})
            _exit(0)

        baseline = Baseline.read()
        built = workload.with_model(build_for_ranks(job, workload.with_weights(), connection.fileno(), refuse))
        preload.freeze()
        sys.stdout.flush()  # else each rank prints what the build has printed
        sys.stderr.flush()
        meter = make_meter(job.device, None, 0)
        is_host = find_device(job.device).shares_host_memory
        if is_host:
            meter.start(baseline)
        _answer(connection, {"device_bytes": (meter.peaks()["device"] if is_host else 0) or 0})
        while True:
            data, descriptors, *_ = socket.recv_fds(connection, _MESSAGE_BYTES, 2)
            if not data:
                break
            file, port = json.loads(data)
            board = Heartbeats.from_fd(descriptors[0])
            store = socket.socket(fileno=descriptors[1]) if len(descriptors) > 1 else None
            live = functools.partial(
                live_as_rank,
                (next_job := RankJob.from_json(Path(file).read_text())),
                board=board, store=store, port=port, parent=zygote, workload=built, baseline=baseline,
            )  # fmt: skip
            pids = [_fork_for(zygote, functools.partial(live, slot)) for slot in range(len(next_job.local_ranks))]
            board.close()
            if store is not None:
                store.close()
            _answer(connection, {"pids": pids})
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            _answer(connection, {"apart": f"{type(error).__name__}: {read_text(error)}"})
    finally:
        _exit(0)


def _answer(connection: socket.socket, answer: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(answer).encode() + b"\n")


def _fork_for(adopter: int, live: Callable[[], object]) -> int:
    """Fork a process that runs `live` as a child of `adopter`, which adopts orphans; return its pid."""
    reads, writes = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid == 0:
            until = time.monotonic() + _ADOPTED_S
            while os.getppid() != adopter and time.monotonic() < until:
                time.sleep(0.001)
            live()
        os.write(writes, str(pid).encode())
        _exit(0)
    os.close(writes)
    os.waitpid(between, 0)
    with open(reads, "rb") as pipe:
        return int(pipe.read())
