"""The agent of a node: a Ray actor that owns the zygote and runs jobs with it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..devices import Health, find_device
from ..diagnosis.evidence import RankError
from ..errors import EnvironmentBroken
from ..rank.job import RankJob
from ..rank.ops import is_cached
from ..system import private, processes, stacks
from ..system.host import find_memory_groups, installed_versions, read_hardware
from ..system.waiting import Loading, Wait
from ..types import WorkloadSource
from ..units import format_signal
from .cleanup import VARIABLE, find_note, has_session, open_session, remove_leftovers, session_variables
from .environment import join_node_environment, zygote_environment
from .monitor import HostMonitor, read_tiers
from .node_messages import (
    ABORT,
    BIND,
    GIVE_UP,
    Heartbeat,
    LoadFailed,
    NodeReport,
    Ready,
    StoreBound,
    StoreFailed,
    TierLevel,
    ZygoteDied,
    ZygoteMessage,
    decode,
)
from .placement import NodeDescription
from .zygote import remove_folders

_POLL_MS = 250
_SILENT_S = 120.0  # a zygote that has work and says nothing for so long is ended; it beats while ranks run
# While a zygote waits for a file server it says nothing, and ends nothing of a run, whose ranks may still train.
_AT_DISK_S = 3600.0
_CLOSE_S = 10.0  # a zygote whose connection was closed ends at once, unless it runs a job or waits for a file
_STRAYS_S = 2.0
_SAID_NOTHING = "it said nothing"
# Ends of a zygote that loads for which its import of the workload is not to blame.
_BY_OTHERS = ("killed by SIGKILL", "killed by SIGTERM", _SAID_NOTHING)
_TIERS_EVERY_S = 1.0
_THROTTLED_EVERY_S = 5.0


class NodeAgent:
    """Runs one job at a time. `progress`, `locate` and `abort` may be called from other threads meanwhile.

    `driver_pid` is the fit's process. `driver_machine` is its machine, as `processes.machine_id` names it.
    `log` is the file that the zygote writes to.
    `environment` is that of the fit's process. With `joins_cluster` it is a part of it, for a node that has one.
    `load_s` is the longest that a zygote may take to load everything.
    """

    def __init__(
        self,
        source: WorkloadSource,
        device: str,
        driver_pid: int,
        driver_machine: str,
        log: str,
        environment: Mapping[str, str],
        joins_cluster: bool = False,
        load_s: float = 900.0,
    ) -> None:
        self.source, self.device, self.log, self.load_s = source, device, log, load_s
        self.environment = join_node_environment(environment) if joins_cluster else environment
        self.joins_cluster = joins_cluster
        self.session = contextlib.ExitStack()  # of this agent, on another machine than the fit's
        # On another machine that pid belongs to a stranger.
        self.driver_pid = driver_pid if driver_machine == processes.machine_id() else 0
        self.zygote: ZygoteProcess | None = None
        self.heartbeat = Heartbeat()
        self.tiers: tuple[TierLevel, ...] = ()
        self.tiers_read_s = self.throttled_read_s = 0.0
        self.throttled: tuple[str, ...] = ()
        self.job_number = 0  # of the running job; 0: none runs
        self.job: RankJob | None = None  # that runs
        self.plain = False  # the zygote does not import the workload, each rank does
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

    def examine(self, ranks: int) -> Health:
        """Return the health of the devices on which so many ranks are about to start here."""
        return find_device(self.device).examine(ranks)

    def find_unbuilt(self, ops: list[str]) -> list[str]:
        """Return the DeepSpeed ops that would have to be built here."""
        return [op for op in ops if not is_cached(op)]

    def start(self) -> Ready | LoadFailed | ZygoteDied:
        """Start the zygote and wait until it has loaded everything, or is at it for too long."""
        processes.adopt_orphans()
        if os.getppid() > 1:
            processes.die_with_parent(os.getppid())  # of the raylet: an actor outlives it by some 15 s otherwise
        if self.joins_cluster and not has_session(self.environment):
            with contextlib.suppress(EnvironmentBroken):  # a guard is for the day when this process is killed
                self.session.enter_context(open_session())
                self.environment = {**self.environment, **session_variables()}
        message = self._load_zygote()
        is_workloads = isinstance(message, ZygoteDied) and not message.how.startswith(_BY_OTHERS)
        if is_workloads and not self.plain:
            self.plain = True  # the rank that imports the workload finds out how it ended the zygote, and where
            message = self._load_zygote()
        return message

    def _load_zygote(self) -> Ready | LoadFailed | ZygoteDied:
        source, log, environment = self.source, self.log, self.environment
        self.zygote = start_zygote(source, self.device, self.driver_pid, log, environment, plain=self.plain)
        message = self.zygote.receive(self.load_s, loads=True) or self._explain_slow_load() or self._bury_zygote()
        assert isinstance(message, Ready | LoadFailed | ZygoteDied)
        return message

    def _explain_slow_load(self) -> LoadFailed | None:
        """End a zygote that has not loaded in time, in the user's code; None where it is elsewhere, or has died."""
        assert self.zygote is not None
        if self.zygote.overdue_s is None or (frame := stacks.find_user_frame(self.zygote.stack)) is None:
            return None
        self._bury_zygote()
        return LoadFailed(
            error=RankError(
                contract=f"{frame}: its import has not gone on for {self.load_s:.0f} s, in {frame.function}",
                hint="mend it, or move the work into build_model or build_batch; a longer --stall-limit allows more",
            )
        )

    def bind_store(self, address: str) -> StoreBound | StoreFailed | LoadFailed | ZygoteDied:
        """Let the zygote listen for the rendezvous of the next job."""
        if self.zygote is None and not isinstance(ready := self.start(), Ready):
            return ready
        assert self.zygote is not None
        self.zygote.send(BIND + address.encode())
        message = self.zygote.receive(_SILENT_S)
        assert message is None or isinstance(message, StoreBound | StoreFailed)
        return message or self._bury_zygote()

    def run(self, job: RankJob, number: int = 0) -> NodeReport | LoadFailed | ZygoteDied:
        """Run one job to its end. A zygote that died is replaced by the next `run`."""
        if self.zygote is None and not isinstance(ready := self.start(), Ready):
            return ready
        assert self.zygote is not None
        session = self.environment[VARIABLE] if has_session(self.environment) else None
        folder = private.make_folder("ranks-", session)
        try:
            return self._run(replace(job, private=str(folder)), number, self.zygote)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, job: RankJob, number: int, zygote: ZygoteProcess) -> NodeReport | ZygoteDied:
        self.heartbeat, host = Heartbeat(), HostMonitor.begin()
        with self.sending:
            self.job_number, self.job = number, job
            zygote.send(job.to_json().encode())
        try:
            at_disk_s = _AT_DISK_S if job.job == "run" else 0.0
            while (message := zygote.receive(_SILENT_S + job.end_s, at_disk_s=at_disk_s)) is not None:
                if isinstance(message, NodeReport):
                    return message
                assert isinstance(message, Heartbeat)
                self.heartbeat = message
        finally:
            self.job_number, self.job = 0, None
        death = self._bury_zygote(_CLOSE_S + job.end_s)  # one that `stop` has told to end ends its ranks first
        remove_folders(job)  # not before the ranks that work in them are gone
        return replace(death, phase=self.heartbeat.phase, step=self.heartbeat.step, host=host.summarize())

    def progress(self) -> Heartbeat:
        """Return the phase and step of the slowest rank, a run's tiers, and the cards that are throttled."""
        job, now = self.job, time.monotonic()
        if job is not None and now - self.throttled_read_s > _THROTTLED_EVERY_S:
            self.throttled, self.throttled_read_s = find_device(self.device).find_throttled(), now
        if job is None or job.job != "run":
            self.tiers = ()
        elif now - self.tiers_read_s > _TIERS_EVERY_S:
            self.tiers, self.tiers_read_s = read_tiers(find_memory_groups(), job.swap), now
        return replace(self.heartbeat, tiers=self.tiers, throttled=self.throttled)

    def locate(self) -> str:
        """Return where the zygote is; '' without one. See `ZygoteProcess.locate`."""
        zygote = self.zygote
        return "" if zygote is None else zygote.locate()

    def abort(self, number: int) -> None:
        """End the ranks of the running job, if it is the one of that number."""
        self._tell(number, ABORT)

    def give_up(self, number: int) -> None:
        """End them as stuck ranks, with their stacks."""
        self._tell(number, GIVE_UP)

    def _tell(self, number: int, line: bytes) -> None:
        with self.sending:
            zygote = self.zygote  # `run` may find the zygote dead and drop it meanwhile
            if zygote is not None and number == self.job_number:
                zygote.send(line)

    def stop(self) -> None:
        """End the zygote and everything below it. A zygote that runs a job removes its swap files before it ends."""
        job = self.job
        if (zygote := self.zygote) is not None:
            zygote.close(_CLOSE_S if job is None else _CLOSE_S + job.end_s)
        self.session.close()
        processes.kill_children(_STRAYS_S)

    def _bury_zygote(self, within_s: float = _CLOSE_S) -> ZygoteDied:
        """Reap the zygote, by SIGKILL after that time, or at once where it says nothing.

        Its ranks die with it; processes that hid from it became our children.
        """
        zygote, self.zygote = self.zygote, None
        assert zygote is not None
        how = "" if zygote.overdue_s is None else f"{_SAID_NOTHING} for {zygote.overdue_s:.0f} s, {zygote.locate()}"
        code = zygote.close(0.0 if how else within_s)
        note = find_note(zygote.process.pid, self.environment)
        self.session.close()  # before the children are killed: its guard is one
        processes.kill_children(_STRAYS_S)
        remove_leftovers(note)  # not before the ranks are gone
        return ZygoteDied(how=how or (f"killed by {format_signal(-code)}" if code < 0 else f"exit {code}"))


@dataclass(slots=True, kw_only=True)
class ZygoteProcess:
    """A running zygote that writes into the file `log`, as its parent sees it.

    `overdue_s` are the seconds after which it was given up, with the `stack` that it had then; None before.
    """

    process: subprocess.Popen[bytes]
    connection: socket.socket
    log: str = os.devnull
    pending: bytes = b""
    overdue_s: float | None = None
    stack: tuple[stacks.Frame, ...] = ()

    def send(self, line: bytes) -> None:
        """Send a job, `ABORT` or `BIND` with an address. A zygote that is gone shows in `receive`."""
        with contextlib.suppress(OSError):
            self.connection.sendall(line + b"\n")

    def receive(self, within_s: float, *, loads: bool = False, at_disk_s: float = 0.0) -> ZygoteMessage | None:
        """Wait for the next message; None when the zygote is gone, or says nothing for so long.

        One that `loads` has longer while it moves many bytes, and one that waits for a disk has `at_disk_s`.
        """
        at_disk = Wait(at_disk_s)
        wait: Wait | Loading = Loading.of(self.process.pid, within_s) if loads else Wait(within_s)
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        while b"\n" not in self.pending:
            while not poll.poll(_POLL_MS):
                is_at_limit = at_disk.is_over()
                if not wait.is_over():
                    continue
                if is_at_limit or not processes.waits_for_disk(self.process.pid):
                    self.overdue_s, self.stack = within_s, self.read_stack()
                    return None
                wait = Wait(within_s)  # when the disk answers, it has as long as before
            data = b""
            with contextlib.suppress(OSError):
                data = self.connection.recv(1 << 20)
            if not data:
                return None
            self.pending += data
        line, _, self.pending = self.pending.partition(b"\n")
        return decode(line)

    def read_stack(self) -> tuple[stacks.Frame, ...]:
        """Return the main thread's stack; () where it does not answer."""
        with contextlib.suppress(OSError), open(self.log, "rb") as log:
            return stacks.read_stack(self.process.pid, log.fileno())
        return ()

    def locate(self) -> str:
        """Return where it is; see `stacks.describe_place`."""
        return stacks.describe_place(self.process.pid, self.stack or self.read_stack())

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
    source: WorkloadSource,
    device: str,
    driver_pid: int,
    log: str,
    environment: Mapping[str, str],
    *,
    plain: bool = False,
) -> ZygoteProcess:
    """Start a zygote as a child of this process. Its first message is `Ready` or `LoadFailed`.

    A plain one does not import the workload: each rank does.
    """
    connection, peer = socket.socketpair()
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    words = [str(peer.fileno()), str(driver_pid), json.dumps(asdict(source)), *(["--plain"] if plain else [])]
    with peer, open(log, "ab") as file:
        process = subprocess.Popen(
            [*processes.python_command("autods.runner.zygote"), *words],
            pass_fds=[peer.fileno()],
            env=zygote_environment(device, environment),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,  # the terminal's Ctrl-C is not meant for it
        )
    return ZygoteProcess(process=process, connection=connection, log=log)


def digest_file(path: str) -> str | None:
    """SHA-256 of a file's content; None where it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None
