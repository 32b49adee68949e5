"""The zygote: a single-threaded process that has torch, DeepSpeed and the user's module loaded and forks the ranks.

The agent of a node starts it as `python -m autods.runner.zygote FD DRIVER_PID SOURCE`. It reads lines from the socket
FD: a job, `abort`, or `bind ADDRESS`. It answers with messages of `protocol`: `Ready` once, `Heartbeat`s while a job
runs and a `NodeReport` at its end.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from dataclasses import dataclass, replace

from ..schema import read_as
from ..system import processes
from ..trial import preload
from ..trial.job import RankJob, describe_error
from ..trial.progress import Beat
from ..types import WorkloadSource
from ..workload.load import load
from ..workload.protocol import Workload
from .protocol import (
    ABORT,
    BIND,
    Heartbeat,
    LoadFailed,
    RankError,
    Ready,
    StoreBound,
    StoreFailed,
    ZygoteMessage,
    encode,
)
from .ranks import run_ranks


def main(argv: list[str]) -> None:
    """Serve jobs until the agent or the fit's process is gone."""
    agent = socket.socket(fileno=int(argv[0]))
    driver_pid, source = int(argv[1]), WorkloadSource(**json.loads(argv[2]))
    processes.adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the fit handles Ctrl-C and tells us
    driver = _open_pidfd(driver_pid)
    with processes.die_with_peer(agent):
        ready, workload = _load(source, argv)
    agent.sendall(encode(ready))
    spawn = isinstance(ready, Ready) and ready.spawn_because is not None
    Zygote(agent, driver, workload, spawn).serve()


def _load(source: WorkloadSource, argv: list[str]) -> tuple[Ready | LoadFailed, Workload | None]:
    """Import everything that ranks need.

    A module of the user's can make this process unfit to fork. Then it begins again without that module, and each
    rank imports it.
    """
    gc.disable()  # nearly all that imports make stays
    preload.preload()
    reason = preload.find_fork_hazard()
    workload = None
    if "--plain" not in argv and reason is None:
        try:
            if source.kind == "script":
                preload.preload_script(source)
            else:
                workload = load(source)
        except BaseException as error:
            traceback.print_exc()  # into our log, where the user is sent
            return LoadFailed(error=read_as(RankError, describe_error(error, source.path))), None
        reason = preload.find_fork_hazard()
        if reason is not None:
            os.execv(sys.executable, [sys.executable, "-m", "autods.runner.zygote", *argv, "--plain"])
    gc.enable()
    preload.freeze()
    return Ready(pid=os.getpid(), spawn_because=reason), workload


@dataclass(slots=True)
class Zygote:
    """Serves one agent.

    `driver` is a pidfd of the fit's process if that lives on this machine.
    `spawn` starts ranks as new processes, because this one must not be forked.
    """

    agent: socket.socket
    driver: int | None
    workload: Workload | None
    spawn: bool
    store: socket.socket | None = None  # bound for the next job

    def serve(self) -> None:
        """Read lines until one of the other ends is gone."""
        poll = select.poll()
        poll.register(self.agent, select.POLLIN | select.POLLHUP)
        if self.driver is not None:
            poll.register(self.driver, select.POLLIN)
        pending = b""
        while True:
            if self.driver in [fd for fd, _ in poll.poll()]:
                return
            data = self.agent.recv(1 << 20)
            if not data:
                return
            pending += data
            while b"\n" in pending:
                line, _, pending = pending.partition(b"\n")
                if line == ABORT:  # it came after the end of the job that it meant
                    continue
                if line.startswith(BIND):
                    self._send(self.bind_store(line.removeprefix(BIND).decode()))
                    continue
                # An abort that came together with the job will not be seen on the socket.
                self.run_job(RankJob.from_json(line.decode()), aborted=ABORT in pending.split(b"\n"))

    def bind_store(self, address: str) -> StoreBound | StoreFailed:
        """Listen for the rendezvous of the next job; its ranks inherit the socket."""
        if self.store is not None:
            self.store.close()  # of a job that never came
        try:
            self.store = socket.create_server((address, 0))
        except OSError as error:
            self.store = None
            return StoreFailed(reason=f"{address}: {error.strerror}")
        return StoreBound(port=self.store.getsockname()[1])

    def run_job(self, job: RankJob, *, aborted: bool) -> None:
        """Run the ranks of a job and send the report."""
        store, self.store = self.store, None
        spawn_because = preload.find_fork_hazard() if job.device == "cuda" and not self.spawn else None
        report = run_ranks(
            job,
            self.workload,
            agent=self.agent,
            driver=self.driver,
            send_beat=self._send_beat,
            spawn=self.spawn or spawn_because is not None,
            store=store,
            aborted=aborted,
        )
        if spawn_because is not None:
            note = f"ranks start as new processes from here on, some 10 s slower a trial: {spawn_because}"
            report = replace(report, notes=(*report.notes, note))
        if job.job == "ops" and job.device == "cpu" and all(rank.exit_code == 0 for rank in report.ranks):
            _load_ops(job)  # on CUDA DeepSpeed asks each GPU for its architecture, which initialises CUDA here
        self._send(report)

    def _send_beat(self, beat: Beat) -> None:
        self._send(Heartbeat(phase=beat.phase, step=beat.step))

    def _send(self, message: ZygoteMessage) -> None:
        with contextlib.suppress(OSError):  # the agent may be gone; then `serve` ends
            self.agent.sendall(encode(message))


def _load_ops(job: RankJob) -> None:
    """Load the ops that were just built, so that every later rank inherits them."""
    from ..trial.ops import build

    with contextlib.redirect_stdout(sys.stderr):
        for op in job.ops:
            build(op)


def _open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when that process ends; None where pid is 0 or the kernel has no pidfd."""
    try:
        return os.pidfd_open(pid) if pid else None
    except OSError:
        return None


if __name__ == "__main__":
    main(sys.argv[1:])
