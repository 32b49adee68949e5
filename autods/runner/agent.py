"""The agent of a node: a Ray actor that owns the zygote and runs trials with it."""

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..system import processes
from ..system.gpus import uuids_to_indices
from ..system.host import installed_versions, read_hardware
from ..trial.job import RankJob
from ..trial.ops import is_cached, ops_folder
from ..types import Device, WorkloadSource
from .monitor import HostWatch
from .ranks import remove_folders

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # of the zygote, which is forked; a rank gets its own number, see `trial.worker`
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_ON_CPU = {
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    # Without these a budget is eaten by per-thread arenas and by freed memory that malloc keeps.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
# On CUDA, what the user did not set.
_ON_CUDA = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # NVML's order; CUDA's own puts the fastest card first
    "NCCL_DEBUG": "WARN",  # else NCCL keeps to itself why it failed: out of memory, say
}
_ENDS_S = 2.0  # a zygote whose connection was closed ends at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Zygote:
    """A zygote process that was started. It ends when the last copy of `connection` is closed."""

    process: subprocess.Popen[bytes]
    connection: socket.socket

    def close(self) -> int:
        """End it with its ranks; the exit code, negative for a signal."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        try:
            code = self.process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.connection.close()
        return code


def start_zygote(
    source: WorkloadSource, device: Device, driver_pid: int, log: str, environment: Mapping[str, str]
) -> Zygote:
    """Start a zygote as a child of this process; it sends {"ready": …} when it has loaded everything."""
    connection, peer = socket.socketpair()
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    words = [str(peer.fileno()), str(driver_pid), json.dumps(asdict(source))]
    with peer, open(log, "ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "autods.runner.zygote", *words],
            pass_fds=[peer.fileno()],
            env=_environment(device, environment),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,  # the terminal's Ctrl-C is not for it
        )
    return Zygote(process=process, connection=connection)


def _environment(device: Device, environment: Mapping[str, str]) -> dict[str, str]:
    scripts = os.path.dirname(sys.executable)  # ninja lives there
    said = {
        **environment,  # the user's own, which a cluster that already ran does not know
        **_ENVIRONMENT,
        "PATH": os.pathsep.join([scripts, environment.get("PATH", "")]),
        "TORCH_EXTENSIONS_DIR": str(ops_folder()),
    }
    package = Path(__file__).parents[2]
    if "runtime_resources" in package.parts:  # Ray brought us here: the zygote has to find the same
        said["PYTHONPATH"] = os.pathsep.join(filter(None, [str(package), environment.get("PYTHONPATH", "")]))
    if device == "cpu":
        return said | _ON_CPU
    said = _ON_CUDA | said
    said["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # is_available() must not initialise CUDA before the fork
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        given = os.environ["CUDA_VISIBLE_DEVICES"]  # the cards that Ray gave this actor
        said["CUDA_VISIBLE_DEVICES"] = uuids_to_indices(given)
        if said["CUDA_VISIBLE_DEVICES"] != given:
            said["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # whose numbers they are
    return said


class Node:
    """`start` once, then `run` jobs one at a time; `progress` and `abort` may be called from another thread."""

    def __init__(
        self,
        source: dict[str, Any],
        device: Device,
        driver: dict[str, Any],  # its pid, and the machine where that is its pid
        log: str,
        environment: dict[str, str],
    ) -> None:
        self.source = WorkloadSource(**source)
        self.device, self.log, self.environment = device, log, environment
        # On another machine that pid is a stranger's.
        self.driver_pid = int(driver["pid"]) if driver["machine"] == processes.machine_id() else 0
        self.number = 0  # of the job under way; 0: none
        self.telling = threading.Lock()  # a word that is meant for one job must not come after the next one's line
        self.zygote: Zygote | None = None
        self.connection: socket.socket | None = None
        self.beat: list[Any] = ["start", 0]
        self.reading = b""

    def seen(self) -> dict[str, Any]:
        """What this node is, plain: its hardware and software."""
        return {"hardware": asdict(read_hardware()), "versions": installed_versions()}

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
        processes.adopt_orphans()
        if os.getppid() > 1:
            processes.die_with_parent(os.getppid())  # of the raylet: left alone an actor outlives it by some 15 s
        self.zygote = start_zygote(self.source, self.device, self.driver_pid, self.log, self.environment)
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
        zygote = self.zygote
        if zygote is not None:
            zygote.close()
        processes.kill_children(2.0)

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
        code = self.zygote.close()
        self.zygote = self.connection = None
        processes.kill_children(2.0)
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit {code}"


def digest_of(path: str) -> str | None:
    """Of a file's content; None where there is none."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None
