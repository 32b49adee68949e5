"""One node's side of a trial: owns the zygote, hands it jobs, and starts another one when it dies.

Plain Python; `runner.py` makes it a Ray actor.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import procs
from ..hardware import look, versions
from ..trial.ops import is_cached
from ..trial.spec import RankJob
from ..values import Device, WorkloadSource
from .host_watch import HostWatch
from .launch import Zygote, launch, take
from .lifeline import hold
from .supervise import remove_folders

_LEAVES_S = 0.2


class Node:
    """`start` once, then `run` jobs one at a time; `progress` and `abort` may be called from another thread."""

    def __init__(
        self,
        source: dict[str, Any],
        device: Device,
        driver: dict[str, Any],  # its pid, and the machine where that is its pid
        log: str,
        environment: dict[str, str],
        offered: str | None = None,  # where a zygote that already loads can be had
    ) -> None:
        self.source = WorkloadSource(**source)
        self.device, self.log, self.environment = device, log, environment
        # On another machine that pid is a stranger's.
        self.driver_pid = int(driver["pid"]) if driver["machine"] == procs.machine() else 0
        self.offered, self.number = offered, 0  # of the job under way; 0: none
        self.telling = threading.Lock()  # a word that is meant for one job must not come after the next one's line
        self.zygote: Zygote | None = None
        self.keeper: subprocess.Popen[bytes] | None = None  # of the one that we started
        self.connection: socket.socket | None = None
        self.beat: list[Any] = ["start", 0]
        self.reading = b""

    def seen(self) -> dict[str, Any]:
        """What this node is, plain: its hardware and software."""
        return {"hardware": asdict(look()), "versions": versions()}

    def hold(self, place: dict[str, Any], number: int) -> bool:
        """Be bound to the driver's life: when it is gone, so are the ranks. See `lifeline.hold`."""
        return hold(place, number, self.abort)

    def clock(self) -> float:
        """Seconds of this node's monotonic clock."""
        return time.monotonic()

    def unseen(self, files: dict[str, str], folders: list[str]) -> list[str]:
        """Those of these files that are not here, or have another digest, and of these folders that cannot be used."""
        other = [path for path, digest in files.items() if digest_of(path) != digest]
        return other + [path for path in folders if not os.access(path, os.W_OK | os.X_OK)]

    def uncached(self, ops: list[str]) -> list[str]:
        """Those of these DeepSpeed ops that would have to be built here."""
        return [op for op in ops if not is_cached(op)]

    def bind(self, address: str) -> dict[str, Any]:
        """Have the zygote listen for the next job's ranks: {"bound": port}, or None there and why; {"died"}."""
        if self.connection is None and "pid" not in (ready := self.start()):
            return ready
        assert self.connection is not None
        try:
            self.connection.sendall(f"bind {address}\n".encode())
            said = self._next()
        except OSError:
            said = None
        return said if said is not None else {"died": self._death()}

    def start(self) -> dict[str, Any]:
        """Start the zygote and wait until it is ready: {"pid"}, or {"error"} with what the user's module raised."""
        procs.adopt_orphans()
        if os.getppid() > 1:
            procs.die_with_parent(os.getppid())  # of the raylet: left alone an actor outlives it by some 15 s
        self.zygote = self._taken() or self._launched()
        self.connection, self.reading = self.zygote.connection, b""
        message = self._next()
        if message is None:
            return {"died": self._death()}
        return dict(message["ready"])

    def run(self, line: str, number: int = 0) -> dict[str, Any]:
        """Run one job to its end. {"died"} when the zygote died under it; the next `run` starts another."""
        if self.connection is None:
            ready = self.start()
            if "pid" not in ready:
                return ready
        assert self.connection is not None
        self.beat, host = ["start", 0], HostWatch.begin()
        try:
            with self.telling:
                self.number = number
                self.connection.sendall(line.encode() + b"\n")
            while (message := self._next()) is not None:
                if "done" in message:
                    return dict(message["done"])
                self.beat = message["beat"]
        except OSError:
            pass
        finally:
            self.number = 0
        died = self._death()
        remove_folders(RankJob.from_json(line))  # not before the ranks that work in them are gone
        phase, step = self.beat
        return {"died": died, "phase": phase, "step": step, "gone_at_s": time.monotonic(), "host": host.report()}

    def progress(self) -> list[Any]:
        """Phase and step of the slowest rank."""
        return self.beat

    def abort(self, number: int | None = None) -> None:
        """End the running job, if it still is the one of that number: its ranks are killed."""
        with self.telling:
            connection = self.connection  # `run` may find the zygote dead and drop it meanwhile
            if connection is not None and number in (None, self.number):
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
            except TimeoutError:
                zygote.kill()
            except OSError:
                pass
        procs.kill_children(2.0)

    def leave(self) -> None:
        """`stop`, and end this process a moment later: where Ray's head is gone, nobody else does."""
        self.stop()
        threading.Timer(_LEAVES_S, os._exit, (0,)).start()

    def _taken(self) -> Zygote | None:
        """The one that the driver started, the first time."""
        offered, self.offered = self.offered, None
        if offered is not None:
            with contextlib.suppress(OSError):
                return take(offered)
        return None

    def _launched(self) -> Zygote:
        zygote, self.keeper = launch(self.source, self.device, self.driver_pid, self.log, self.environment)
        return zygote

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
        self.zygote.close()
        self.zygote = self.connection = None
        procs.kill_children(2.0)
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit {code}"


def digest_of(path: str) -> str | None:
    """Of a file's content; None where there is none."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None
