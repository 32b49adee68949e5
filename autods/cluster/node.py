"""One node's side of a trial: owns the zygote, hands it jobs, and starts another one when it dies.

Plain Python; `runner.py` makes it a Ray actor.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import procs
from ..trial.ops import ops_folder
from ..trial.spec import RankJob
from ..values import Device, WorkloadSource
from .host_watch import HostWatch
from .supervise import remove_folders

_ZYGOTE_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Without these a budget is eaten by per-thread arenas and by freed memory that malloc keeps.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}


class Node:
    """`start` once, then `run` jobs one at a time; `progress` and `abort` may be called from another thread."""

    def __init__(
        self, source: dict[str, Any], device: Device, driver_pid: int, log: str, environment: dict[str, str]
    ) -> None:
        self.source = WorkloadSource(**source)
        self.device, self.driver_pid, self.log, self.environment = device, driver_pid, log, environment
        self.zygote: subprocess.Popen[bytes] | None = None
        self.connection: socket.socket | None = None
        self.beat: list[Any] = ["start", 0]
        self.reading = b""

    def start(self) -> dict[str, Any]:
        """Start the zygote and wait until it is ready: {"pid"}, or {"error"} with what the user's module raised."""
        procs.adopt_orphans()
        ours, theirs = socket.socketpair()
        Path(self.log).parent.mkdir(parents=True, exist_ok=True)
        argv = [str(theirs.fileno()), str(self.driver_pid), json.dumps(asdict(self.source))]
        with open(self.log, "ab") as log:
            self.zygote = subprocess.Popen(
                [sys.executable, "-m", "autods.cluster.zygote", *argv],
                pass_fds=[theirs.fileno()],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # the terminal's Ctrl-C is not for it
            )
        theirs.close()
        self.connection, self.reading = ours, b""
        message = self._next()
        if message is None:
            return {"died": self._death()}
        return dict(message["ready"])

    def run(self, line: str) -> dict[str, Any]:
        """Run one job to its end. {"died"} when the zygote died under it; the next `run` starts another."""
        if self.connection is None:
            ready = self.start()
            if "pid" not in ready:
                return ready
        assert self.connection is not None
        self.beat, host = ["start", 0], HostWatch.begin()
        try:
            self.connection.sendall(line.encode() + b"\n")
            while (message := self._next()) is not None:
                if "done" in message:
                    return dict(message["done"])
                self.beat = message["beat"]
        except OSError:
            pass
        died = self._death()
        remove_folders(RankJob.from_json(line))  # not before the ranks that work in them are gone
        phase, step = self.beat
        return {"died": died, "phase": phase, "step": step, "gone_at_s": time.monotonic(), "host": host.report()}

    def progress(self) -> list[Any]:
        """Phase and step of the slowest rank."""
        return self.beat

    def abort(self) -> None:
        """End the running job: its ranks are killed."""
        connection = self.connection  # `run` may find the zygote dead and drop it meanwhile
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.sendall(b"abort\n")

    def stop(self) -> None:
        """End the zygote and everything below it."""
        zygote, connection = self.zygote, self.connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if zygote is not None:
            try:
                zygote.wait(2)
            except subprocess.TimeoutExpired:
                zygote.kill()
                zygote.wait()
        procs.kill_children(2.0)

    def _environment(self) -> dict[str, str]:
        scripts = os.path.dirname(sys.executable)  # ninja lives there
        said = {
            **self.environment,  # the user's own, which a cluster that already ran does not know
            **_ZYGOTE_ENVIRONMENT,
            "PATH": os.pathsep.join([scripts, self.environment.get("PATH", "")]),
            "TORCH_EXTENSIONS_DIR": str(ops_folder()),
        }
        if self.device == "cpu":
            said |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        else:
            said |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # is_available() must not initialise CUDA before the fork
        if "CUDA_VISIBLE_DEVICES" in os.environ and self.device == "cuda":
            said["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]  # the cards that Ray gave this actor
        return said

    def _next(self) -> dict[str, Any] | None:
        """The zygote's next message; None when it is gone."""
        assert self.connection is not None
        while b"\n" not in self.reading:
            try:
                data = self.connection.recv(1 << 20)
            except OSError:
                data = b""
            if not data:
                return None
            self.reading += data
        line, _, self.reading = self.reading.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _death(self) -> str:
        """How the zygote died; its ranks follow it, strays that hid from it were adopted by us."""
        assert self.zygote is not None
        code = self.zygote.wait()
        if self.connection is not None:
            self.connection.close()
        self.zygote = self.connection = None
        procs.kill_children(2.0)
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
