"""The zygote: a single-threaded process that has torch, DeepSpeed and the user's module loaded and forks the ranks.

Started by the agent of its node as `python -m autods.runner.zygote FD DRIVER_PID SOURCE`; speaks JSON lines on the
socket: it says {"ready": …} once, then for each job line {"beat": …} while it runs and {"done": …} at its end.
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
from typing import Any

from ..system import processes
from ..trial import lean, preload
from ..trial.job import RankJob, describe
from ..trial.progress import Beat
from ..types import WorkloadSource
from ..workload.load import load
from ..workload.protocol import Workload
from .ranks import supervise


def main(argv: list[str]) -> None:
    """Serve jobs until the owner or the driver is gone."""
    owner = socket.socket(fileno=int(argv[0]))
    driver_pid, source = int(argv[1]), WorkloadSource(**json.loads(argv[2]))
    preload_workload = "--plain" not in argv
    processes.adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle; it tells us by the socket
    driver = _pidfd(driver_pid)
    with processes.die_with_peer(owner):
        ready, workload = _prepare(source, preload_workload, argv)
    _say(owner, {"ready": ready})
    _serve(owner, driver, workload, spawn=bool(ready.get("unfit")))


def _prepare(source: WorkloadSource, preload_workload: bool, argv: list[str]) -> tuple[dict[str, Any], Workload | None]:
    gc.disable()  # nearly all that imports make stays
    lean.install()
    preload.preload()
    reason = preload.unfit_to_fork()
    workload = None
    if preload_workload and reason is None:
        try:
            if source.kind == "script":
                preload.preload_script(source)
            else:
                workload = load(source)
        except BaseException as error:
            traceback.print_exc()  # into our log, where a person is sent
            return {"error": describe(error, source.path)}, None
        lean.load_what_is_named(source.path)
        reason = preload.unfit_to_fork()
        if reason is not None:
            # Importing the user's module made this process unfit: begin again, and let each rank import it itself.
            os.execv(sys.executable, [sys.executable, "-m", "autods.runner.zygote", *argv, "--plain"])
    gc.enable()
    preload.settle()
    return {"pid": os.getpid(), "unfit": reason}, workload


def _serve(owner: socket.socket, driver: int | None, workload: Workload | None, *, spawn: bool) -> None:
    poll = select.poll()
    poll.register(owner, select.POLLIN | select.POLLHUP)
    if driver is not None:
        poll.register(driver, select.POLLIN)
    pending, bound = b"", None
    while True:
        ready = [fd for fd, _ in poll.poll()]
        if driver in ready:
            return
        data = owner.recv(1 << 20)
        if not data:
            return
        pending += data
        while b"\n" in pending:
            line, _, pending = pending.partition(b"\n")
            if line == b"abort":  # crossed the end of the job that it meant
                continue
            if line.startswith(b"bind "):
                bound = _bound(line[5:].decode(), owner, bound)
                continue
            aborted = b"abort" in pending.split(b"\n")  # it came with the job, and so is not seen on the socket
            _run(line.decode(), owner, driver, workload, spawn, bound, aborted)
            bound = None


def _bound(address: str, owner: socket.socket, earlier: socket.socket | None) -> socket.socket | None:
    """A listening socket for the store of the next job, whose ranks inherit it; its port is said."""
    if earlier is not None:
        earlier.close()  # of a job that never came
    try:
        bound = socket.create_server((address, 0))
    except OSError as error:
        _say(owner, {"bound": None, "why": f"{address}: {error.strerror}"})
        return None
    _say(owner, {"bound": bound.getsockname()[1]})
    return bound


def _run(
    line: str,
    owner: socket.socket,
    driver: int | None,
    workload: Workload | None,
    spawn: bool,
    bound: socket.socket | None,
    aborted: bool,
) -> None:
    job = RankJob.from_json(line)

    def told(beat: Beat) -> None:
        with contextlib.suppress(OSError):
            _say(owner, {"beat": [beat.phase, beat.step]})

    became = preload.unfit_to_fork() if job.device == "cuda" and not spawn else None
    result = supervise(
        job, workload, owner=owner, driver=driver, told=told, spawn=spawn or became is not None, bound=bound,
        aborted=aborted,
    )  # fmt: skip
    if became is not None:
        slower = f"ranks start as new processes from here on, some 10 s slower a trial: {became}"
        result["said"] = [*result.get("said", ()), slower]
    if job.job == "ops" and job.device == "cpu" and all(end["exit"] == 0 for end in result["ends"]):
        _load_ops(job)  # on CUDA DeepSpeed asks each card for its architecture, which initialises CUDA here
    with contextlib.suppress(OSError):  # the owner may be gone; then the main loop ends
        _say(owner, {"done": result})


def _load_ops(job: RankJob) -> None:
    """Load what was just built, so that every later rank inherits it loaded."""
    from ..trial.ops import build

    with contextlib.redirect_stdout(sys.stderr):
        for op in job.ops:
            build(op)


def _pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when that process ends; None when it is on another machine."""
    try:
        return os.pidfd_open(pid) if pid else None
    except OSError:
        return None


def _say(owner: socket.socket, message: dict[str, Any]) -> None:
    owner.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
