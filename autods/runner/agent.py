"""The agent of a node: a Ray actor that owns the zygote and runs jobs with it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..system import processes
from ..system.host import installed_versions, read_hardware
from ..trial.job import RankJob
from ..trial.ops import is_cached
from ..types import Device, WorkloadSource
from .environment import join_node_environment, zygote_environment
from .monitor import HostMonitor
from .placement import NodeDescription
from .protocol import (
    ABORT,
    BIND,
    Heartbeat,
    LoadFailed,
    NodeReport,
    Ready,
    StoreBound,
    StoreFailed,
    ZygoteDied,
    ZygoteMessage,
    decode,
)
from .zygote import remove_folders

_CLOSE_S = 10.0  # a zygote whose connection was closed ends at once, unless it runs a job or waits for a file
_STRAYS_S = 2.0


class NodeAgent:
    """Runs one job at a time. `progress` and `abort` may be called from other threads meanwhile.

    `driver_pid` is the fit's process. `driver_machine` is its machine, as `processes.machine_id` names it.
    `log` is the file that the zygote writes to.
    `environment` is that of the fit's process. With `joins_cluster` it is a part of it, for a node that has one.
    """

    def __init__(
        self,
        source: WorkloadSource,
        device: Device,
        driver_pid: int,
        driver_machine: str,
        log: str,
        environment: Mapping[str, str],
        joins_cluster: bool = False,
    ) -> None:
        self.source, self.device, self.log = source, device, log
        self.environment = join_node_environment(environment) if joins_cluster else environment
        # On another machine that pid belongs to a stranger.
        self.driver_pid = driver_pid if driver_machine == processes.machine_id() else 0
        self.zygote: ZygoteProcess | None = None
        self.heartbeat = Heartbeat()
        self.job_number = 0  # of the running job; 0: none runs
        self.job: RankJob | None = None  # that runs
        self.sending = threading.Lock()  # an abort that is meant for one job must not follow the next job's line

    def describe(self, address: str) -> NodeDescription:
        """The hardware and software of this node, which has that address."""
        return NodeDescription(address=address, hardware=read_hardware(), versions=installed_versions())

    def read_clock(self) -> float:
        """Seconds of this node's monotonic clock."""
        return time.monotonic()

    def find_missing(self, files: Mapping[str, str], folders: list[str]) -> list[str]:
        """Return the files that are not here or have another digest, and the folders that cannot be written."""
        missing = [path for path, digest in files.items() if digest_file(path) != digest]
        return missing + [path for path in folders if not os.access(path, os.W_OK | os.X_OK)]

    def find_unbuilt(self, ops: list[str]) -> list[str]:
        """Return the DeepSpeed ops that would have to be built here."""
        return [op for op in ops if not is_cached(op)]

    def start(self) -> Ready | LoadFailed | ZygoteDied:
        """Start the zygote and wait until it has loaded everything."""
        processes.adopt_orphans()
        if os.getppid() > 1:
            processes.die_with_parent(os.getppid())  # of the raylet: an actor outlives it by some 15 s otherwise
        self.zygote = start_zygote(self.source, self.device, self.driver_pid, self.log, self.environment)
        message = self.zygote.receive()
        assert message is None or isinstance(message, Ready | LoadFailed)
        return message or self._bury_zygote()

    def bind_store(self, address: str) -> StoreBound | StoreFailed | LoadFailed | ZygoteDied:
        """Let the zygote listen for the rendezvous of the next job."""
        if self.zygote is None and not isinstance(ready := self.start(), Ready):
            return ready
        assert self.zygote is not None
        self.zygote.send(BIND + address.encode())
        message = self.zygote.receive()
        assert message is None or isinstance(message, StoreBound | StoreFailed)
        return message or self._bury_zygote()

    def run(self, job: RankJob, number: int = 0) -> NodeReport | LoadFailed | ZygoteDied:
        """Run one job to its end. A zygote that died is replaced by the next `run`."""
        if self.zygote is None and not isinstance(ready := self.start(), Ready):
            return ready
        assert self.zygote is not None
        self.heartbeat, host = Heartbeat(), HostMonitor.begin()
        with self.sending:
            self.job_number, self.job = number, job
            self.zygote.send(job.to_json().encode())
        try:
            while (message := self.zygote.receive()) is not None:
                if isinstance(message, NodeReport):
                    return message
                assert isinstance(message, Heartbeat)
                self.heartbeat = message
        finally:
            self.job_number, self.job = 0, None
        death = self._bury_zygote()
        remove_folders(job)  # not before the ranks that work in them are gone
        return replace(death, phase=self.heartbeat.phase, step=self.heartbeat.step, host=host.summarize())

    def progress(self) -> Heartbeat:
        """Return the phase and step of the slowest rank."""
        return self.heartbeat

    def abort(self, number: int) -> None:
        """End the ranks of the running job, if it is the one of that number."""
        with self.sending:
            zygote = self.zygote  # `run` may find the zygote dead and drop it meanwhile
            if zygote is not None and number == self.job_number:
                zygote.send(ABORT)

    def stop(self) -> None:
        """End the zygote and everything below it. A zygote that runs a job removes its swap files before it ends."""
        job = self.job
        if (zygote := self.zygote) is not None:
            zygote.close(_CLOSE_S if job is None else _CLOSE_S + job.end_s)
        processes.kill_children(_STRAYS_S)

    def _bury_zygote(self) -> ZygoteDied:
        """Reap the zygote. Its ranks die with it; processes that hid from it became our children."""
        assert self.zygote is not None
        code = self.zygote.close()
        self.zygote = None
        processes.kill_children(_STRAYS_S)
        return ZygoteDied(how=f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit {code}")


@dataclass(slots=True, kw_only=True)
class ZygoteProcess:
    """A running zygote, as its parent sees it."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    pending: bytes = b""

    def send(self, line: bytes) -> None:
        """Send a job, `ABORT` or `BIND` with an address. A zygote that is gone shows in `receive`."""
        with contextlib.suppress(OSError):
            self.connection.sendall(line + b"\n")

    def receive(self) -> ZygoteMessage | None:
        """Wait for the next message; None when the zygote is gone."""
        while b"\n" not in self.pending:
            data = b""
            with contextlib.suppress(OSError):
                data = self.connection.recv(1 << 20)
            if not data:
                return None
            self.pending += data
        line, _, self.pending = self.pending.partition(b"\n")
        return decode(line)

    def close(self, within_s: float = _CLOSE_S) -> int:
        """End the zygote with its ranks, by SIGKILL after that time; return its exit code, negative for a signal."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        try:
            code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = -signal.SIGKILL
            with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a file system that does not answer
                code = self.process.wait(_STRAYS_S)
        self.connection.close()
        return code


def start_zygote(
    source: WorkloadSource, device: Device, driver_pid: int, log: str, environment: Mapping[str, str]
) -> ZygoteProcess:
    """Start a zygote as a child of this process. Its first message is `Ready` or `LoadFailed`."""
    connection, peer = socket.socketpair()
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    words = [str(peer.fileno()), str(driver_pid), json.dumps(asdict(source))]
    with peer, open(log, "ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "autods.runner.zygote", *words],
            pass_fds=[peer.fileno()],
            env=zygote_environment(device, environment),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,  # the terminal's Ctrl-C is not meant for it
        )
    return ZygoteProcess(process=process, connection=connection)


def digest_file(path: str) -> str | None:
    """SHA-256 of a file's content; None where it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None
