"""The zygote: a single-threaded process that has torch, DeepSpeed and the user's module loaded and forks the ranks.

The agent of a node starts it as `python -m autods.runner.zygote FD DRIVER_PID SOURCE`. It reads lines from the socket
FD: a job, `abort`, or `bind ADDRESS`. It answers with `node_messages`: `Ready` once, `Heartbeat`s while a job runs and
a `NodeReport` at its end.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from os import _exit  # the workload may replace it
from pathlib import Path

from ..config.deepspeed import required_ops
from ..devices import find_device
from ..rank import ops, preload
from ..rank.job import Beat, Heartbeats, RankJob
from ..rank.record import describe_error
from ..system import private, processes, stacks
from ..system.waiting import Wait
from ..types import WorkloadSource
from ..workload.load import in_one_process, load
from ..workload.protocol import Workload
from .cleanup import VARIABLE, has_session, note_job, remove_leftovers
from .monitor import HostMonitor, RankMonitor, check_freed
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
    ZygoteMessage,
    encode,
)
from .rank_fork import Builder, live_as_rank
from .silence import RunningRank

_POLL_MS = 20
_RUN_POLL_MS = 250  # a run lasts for days, and ranks on the CPU need the cores; a rank's end is noticed at once anyway
_BEAT_EVERY_S = 0.2
_STRAYS_S = 2.0
_FOR_A_PROCESSOR = {"cpu_adam", "cpu_lion", "cpu_adagrad", "async_io"}  # ops whose builders ask for its features
_OTHERS_BUILD_S = 60.0  # where nodes share a home, another one's ranks may have begun a build since this job's start
ABORTED = "aborted"
UNFIT_EXIT = 75  # the workload's import changed this process so that it must not go on


def main(argv: list[str]) -> None:
    """Serve jobs until the agent or the fit's process is gone."""
    agent = socket.socket(fileno=int(argv[0]))
    driver_pid, source = int(argv[1]), WorkloadSource(**json.loads(argv[2]))
    sys.path.append(os.getcwd())  # for the user's imports; last, so that it hides none of ours
    stacks.answer_requests()  # the agent asks where a long import is
    processes.adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the fit handles Ctrl-C and tells us
    processes.leave_sigterm_to_driver()
    driver = None
    if driver_pid:  # on this machine
        with contextlib.suppress(OSError):  # a kernel without pidfd
            driver = os.pidfd_open(driver_pid)
    ops.clear_killed_builds()
    with processes.die_with_peer(agent):
        ready, workload = _load(source, argv, agent)
    agent.sendall(encode(ready))
    spawn = isinstance(ready, Ready) and ready.spawn_because is not None
    Zygote(agent, driver, workload, spawn).serve()


def _load(source: WorkloadSource, argv: list[str], agent: socket.socket) -> tuple[Ready | LoadFailed, Workload | None]:
    """Import everything that ranks need. A script's library that trains is part of it, what else it imports is not.

    A module of the user's can make this process unfit to fork, or to go on at all. Then the process ends, the agent
    starts another one without that module, and each rank imports it.
    """
    gc.disable()  # nearly all that imports make stays
    # DeepSpeed compiles a file to see what there is. Should we be killed meanwhile, the session removes it.
    has_guard = has_session(os.environ)
    try:
        with private.temporary_files_in(Path(os.environ[VARIABLE])) if has_guard else contextlib.nullcontext():
            preload.preload()
    except Exception:
        traceback.print_exc()  # the fit shows the last line
        sys.exit(1)
    reason = preload.find_fork_hazard()
    workload = None
    if "--plain" not in argv and reason is None:
        try:
            if source.form.runs_as_main:
                preload.preload_trainer(source)
            else:
                workload = _load_workload(source, agent)
        except BaseException as error:
            traceback.print_exc()  # into our log, where the user is sent
            return _describe_failure(error, source), None
        _check_fit(preload.find_fork_hazard())
    gc.enable()
    preload.freeze()
    return Ready(pid=os.getpid(), spawn_because=reason), workload


def _load_workload(source: WorkloadSource, agent: socket.socket) -> Workload:
    """Import the user's module. If it ends or changes this process, the agent is told or sees this process end."""
    state = preload.read_process_state(agent.fileno())
    with in_one_process(lambda error: agent.sendall(encode(_describe_failure(error, source)))):
        workload = load(source)
    _check_fit(preload.find_change(state, agent.fileno()))
    return workload


def _check_fit(reason: str | None) -> None:
    """End this process for a reason that the import of the workload has brought; the agent starts another one."""
    if reason is not None:
        print(f"each rank imports the workload by itself: {reason}", file=sys.stderr, flush=True)
        _exit(UNFIT_EXIT)


def _describe_failure(error: BaseException, source: WorkloadSource) -> LoadFailed:
    return LoadFailed(error=describe_error(error, source.path))


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
    builder: Builder | None = None  # has the model of the last trials
    apart: list[tuple[WorkloadSource, int]] = field(default_factory=list)  # whose ranks build the model, by its seed

    def serve(self) -> None:
        """Read lines until one of the other ends is gone."""
        poll = self._poll_peers()
        pending = b""
        while self.driver not in [fd for fd, _ in poll.poll()] and (data := self.agent.recv(1 << 20)):
            pending += data
            while b"\n" in pending:
                line, _, pending = pending.partition(b"\n")
                if line.startswith(BIND):
                    self._send(self.bind_store(line.removeprefix(BIND).decode()))
                elif line not in (ABORT, GIVE_UP):  # else it came after the end of the job that it meant
                    # An abort that came together with the job will not be seen on the socket.
                    self._send(self.run_job(RankJob.from_json(line.decode()), aborted=ABORT in pending.split(b"\n")))

    def bind_store(self, address: str) -> StoreBound | StoreFailed:
        """Listen for the rendezvous of the next job; its ranks inherit the socket."""
        if self.store is not None:
            self.store.close()  # of a job that never came
        try:
            family, *_, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
            self.store = socket.create_server(place, family=family)
        except OSError as error:
            self.store = None
            return StoreFailed(reason=f"{address}: {error.strerror}")
        return StoreBound(port=self.store.getsockname()[1])

    def run_job(self, job: RankJob, *, aborted: bool) -> NodeReport:
        """Run the ranks of a job until they are gone, with every process that they started.

        `aborted` means that the job was ended before it began.
        """
        began = time.monotonic()
        device = find_device(job.device)
        hazard = None if device.survives_fork or self.spawn else preload.find_fork_hazard()
        used_before, host = (device.read_used_bytes() or ())[: len(job.local_ranks)], HostMonitor.begin()
        if _FOR_A_PROCESSOR & {*(job.ops if job.job == "ops" else required_ops(job.ds_config))}:
            preload.remember_processor()  # the ranks will ask for it
        _make_folders(job)
        ops.clear_killed_builds(older_than_s=0.0 if job.is_whole else _OTHERS_BUILD_S)
        shared_before = processes.list_shared_memory()
        board, notes, spawn = Heartbeats.create(len(job.local_ranks)), list[str](), self.spawn or hazard is not None
        builder = None if spawn or aborted else self._find_builder(job, notes)
        monitor = RankMonitor(job, board, self._start_ranks(job, board, builder, spawn=spawn))
        pids = [rank.pid for rank in monitor.running.values()]
        note = note_job(pids, filter(None, (job.scratch, job.swap, job.private)), shared_before)
        if aborted:
            monitor.kill("aborted")
        self._watch(monitor, host, began)
        spared = None if self.builder is None else self.builder.pid
        end_s = min(_STRAYS_S, job.end_s) if monitor.is_overdue() else job.end_s
        left = processes.kill_children(end_s, spared=spared)
        monitor.abandon()
        gone_at_s = time.monotonic()
        board.close()
        processes.unlink_shared_memory(pids, shared_before)
        swap_bytes = processes.folder_bytes(Path(job.swap)) if job.swap else None
        remove_folders(job)
        if not left:
            remove_leftovers(note)
        if job.job == "ops" and device.survives_fork and all(rank.exit_code == 0 for rank in monitor.exits):
            # Every later rank inherits them. On CUDA DeepSpeed asks each GPU for its architecture, which would
            # initialise CUDA here.
            with contextlib.redirect_stdout(sys.stderr):
                for op in job.ops:
                    ops.build(op)
        notes += check_freed(used_before, device.read_used_bytes)
        if hazard is not None:
            notes.append(f"ranks start as new processes from here on, some 10 s slower a trial: {hazard}")
        return NodeReport(
            ranks=tuple(monitor.exits),
            gone_at_s=gone_at_s,
            host=host.summarize(),
            killed_because=monitor.killed_because,
            swap_bytes=swap_bytes,
            notes=tuple(notes),
            built_once=builder is not None,
            survivors=f"{socket.gethostname()}: {'; '.join(map(processes.describe_process, left))}" if left else "",
        )

    def _start_ranks(
        self, job: RankJob, board: Heartbeats, builder: Builder | None, *, spawn: bool
    ) -> dict[int, RunningRank]:
        """Start every rank of this node, and return the ranks by their pidfd. Call it from the main thread only.

        With a `builder` they are forked from it. `spawn` starts new processes, because this one must not be forked.
        """
        parent, now = os.getpid(), time.monotonic()
        # The store of several nodes is served where it was bound. On one node nobody listens on the port.
        port = job.master_port or find_free_port()
        if spawn:
            Path(job.scratch, "job.json").write_text(job.to_json())  # other nodes have the folder too, not the scratch
        pids = None if builder is None else builder.fork_ranks(job, board, self.store, port)
        if builder is not None and pids is None:  # somebody has killed it
            self._end_builder()
            processes.kill_children(job.end_s)
        started = {}
        for slot, number in enumerate(job.local_ranks):
            pid, pidfd, keep = processes.fork_watched() if pids is None else (pids[slot], os.pidfd_open(pids[slot]), -1)
            if pid == 0:
                live_as_rank(
                    job, slot, board=board, store=self.store,
                    port=port, parent=parent, workload=self.workload, keep=keep, spawn=spawn,
                )  # fmt: skip
            started[pidfd] = RunningRank(number, slot, pid, Beat("start", 0, now), now)
        if self.store is not None:
            self.store.close()
            self.store = None
        return started

    def _find_builder(self, job: RankJob, notes: list[str]) -> Builder | None:
        """Return the process that has built the model of this job; None where each rank builds it.

        Appends to `notes` why, once for each model. While ranks train that do not share it, no model stays in memory.
        """
        key = job.source, job.seed
        can_share = job.shares_model and not job.rebind and self.workload is not None and processes.has_pidfd()
        if not can_share or key in self.apart:
            if job.job in ("train", "run"):
                self._end_builder()
            return None
        assert self.workload is not None
        if self.builder is None or (self.builder.source, self.builder.seed) != key:
            self._end_builder()
            self.builder = Builder.start(job, self.workload)
            if (reason := self._await_build(self.builder, job)) is not None:
                self._end_builder()
                if reason != ABORTED:
                    self.apart.append(key)
                    notes.append(f"each rank builds the model by itself in every trial: {reason}")
                return None
        return self.builder if self.builder.has_room(job) else None

    def _await_build(self, builder: Builder, job: RankJob) -> str | None:
        """Wait until the model is built; return why it is not."""
        wait, beat_sent_s = Wait(job.silence_s["build"]), 0.0
        poll = self._poll_peers()
        poll.register(builder.connection, select.POLLIN)
        while not wait.is_over():
            ready = [fd for fd, _ in poll.poll(_POLL_MS)]
            if builder.connection.fileno() in ready:
                return builder.read_end()
            if ready:  # the watch over the ranks reads it
                return ABORTED
            if time.monotonic() - beat_sent_s > _BEAT_EVERY_S:
                beat_sent_s = time.monotonic()
                self._send(Heartbeat(phase="build", silent_s=wait.waited_s))
        return f"its build has not ended after {wait.limit_s:.0f} s"

    def _end_builder(self) -> None:
        builder, self.builder = self.builder, None
        if builder is not None:
            builder.end()

    def _watch(self, monitor: RankMonitor, host: HostMonitor, began: float) -> None:
        """Return when the last rank has ended, by itself or by us, or does not end after it was killed.

        Any message, and the end of a peer, ends the job.
        """
        poll = self._poll_peers()
        for pidfd in monitor.running:
            poll.register(pidfd, select.POLLIN)
        beat_sent_s = 0.0
        while monitor.running and not monitor.is_overdue():
            is_calm = monitor.job.job == "run" and monitor.first_failure_s is None and monitor.killed_s is None
            for fd, _ in poll.poll(_RUN_POLL_MS if is_calm else _POLL_MS):
                poll.unregister(fd)  # a message is read after the job, and would wake this loop without end
                if fd in monitor.running:
                    monitor.collect_exit(fd)
                elif fd == self.driver:
                    monitor.kill("the driver is gone")
                elif self._is_told_to_give_up():
                    monitor.give_up_all()
                elif monitor.killed_s is None:
                    monitor.kill("aborted")
            monitor.check(began)
            running = monitor.running.values()
            host.sample(running)
            if running and time.monotonic() - beat_sent_s > _BEAT_EVERY_S:
                beat_sent_s = time.monotonic()
                slowest = min((rank.beat for rank in running), key=lambda beat: beat.at_s)
                silence = monitor.silence
                self._send(
                    Heartbeat(
                        phase=slowest.phase,
                        step=slowest.step,
                        silent_s=silence.seconds,
                        place=silence.place,
                        awaits_s=silence.awaits_s,
                        forward_s={str(rank.rank): rank.beat.forward_s for rank in running if rank.beat.forward_s},
                    )
                )

    def _is_told_to_give_up(self) -> bool:
        """Whether the agent's next message says so. It stays on the socket until the job has ended."""
        with contextlib.suppress(OSError):
            return self.agent.recv(1 << 16, socket.MSG_PEEK | socket.MSG_DONTWAIT).startswith(GIVE_UP)
        return False

    def _poll_peers(self) -> select.poll:
        poll = select.poll()
        poll.register(self.agent, select.POLLIN | select.POLLHUP)
        if self.driver is not None:
            poll.register(self.driver, select.POLLIN)
        return poll

    def _send(self, message: ZygoteMessage) -> None:
        with contextlib.suppress(OSError):  # the agent may be gone; then `serve` ends
            self.agent.sendall(encode(message))


def find_free_port() -> int:
    """Return a port of loopback that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _make_folders(job: RankJob) -> None:
    """Make the job's folders, without the files of an earlier attempt. Other nodes may have files in there."""
    if job.is_whole:
        shutil.rmtree(job.folder, ignore_errors=True)
    for rank in job.local_ranks:
        log = Path(job.folder, f"rank{rank}.log")
        for file in (log, log.with_suffix(".json"), *processes.find_log_parts(log)):
            file.unlink(missing_ok=True)
    for folder in filter(None, (job.folder, job.scratch, job.swap)):
        Path(folder).mkdir(parents=True, exist_ok=True)


def remove_folders(job: RankJob) -> None:
    """Remove the working directory, the swap files and the private folder of a job."""
    for folder in filter(None, (job.scratch, job.swap, job.private)):
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
