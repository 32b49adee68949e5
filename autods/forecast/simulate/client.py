"""The simulator as the rest of autods sees it: starts the worker, sends requests and reads answers. No torch."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import IO, TypeVar

from ...config.catalogue import Machine
from ...diagnosis.trial_outcome import LARGEST_SURVEY_BATCH, wants_larger_batch
from ...plain_text import clean
from ...system import private, processes, stacks
from ...system.processes import python_command
from ...system.waiting import Loading, Wait
from ...types import ModelFacts, WorkloadSource
from .. import values
from ..values import EngineSpec, Simulation
from .files_read import Stamp
from .protocol import (
    Answer,
    FilesWereRead,
    ModelRequest,
    Request,
    SimulationFailed,
    WorkloadReady,
    receive,
    send,
    send_request,
)

_NO_VARIABLES: Mapping[str, str] = {}
LIMIT_S = 900.0  # of loading, and of one simulation; a workload's own code may read data from a slow file system
_GONE_S = 5.0  # the longest that killed engines take to end, on a very busy machine
_POLL_MS = 250
_COPIES_OF_RAY = "/ray/thirdparty_files"
_LONGER = "mend it; where it was only slow, a longer --stall-limit allows more"
_Answer = TypeVar("_Answer", WorkloadReady, ModelFacts, Simulation)
_NoteFiles = Callable[[Mapping[str, Stamp | None]], None]


def list_module_folders() -> list[str]:
    """Return where the processes look for modules: where we do, and in the user's folder at last.

    Once Ray is imported, its own copies of packages come first with us; a simulation is the same without Ray.
    """
    return [*(path for path in sys.path if path and not path.endswith(_COPIES_OF_RAY)), os.getcwd()]


class SimulatedEngine:
    """A running engine in a separate process. `wait_for` waits until its connection has something to read.

    `note_files` gets the stamps of the files on which the next answer depends.
    """

    def __init__(
        self,
        connection: socket.socket,
        log: IO[bytes],
        wait_for: Callable[[socket.socket], None] = lambda end: None,
        note_files: _NoteFiles = lambda stamps: None,
    ) -> None:
        self._connection, self._log, self._wait_for, self._note_files = connection, log, wait_for, note_files
        self._answers = receive(connection)

    def measure(self, micro_batch: int) -> Simulation:
        """Initialise the engine anew and run two steps. Raises SimulationFailed."""
        send(self._connection, micro_batch)
        return self.receive(Simulation)

    def receive(self, kind: type[_Answer]) -> _Answer:
        """The process's next answer. Raises SimulationFailed."""
        self._wait_for(self._connection)
        return _check(_read_answer(self._answers, self._note_files), kind, self._log)

    def close(self) -> None:
        """End it: its process ends with the connection. Another thread that waits for an answer gets none."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(ValueError):  # that thread is in it, and ends it
            self._answers.close()  # it reads through a file, which would keep the connection open
        self._connection.close()


class ProcessSimulator(values.Simulator):
    """The simulated device for one workload: a prepared process that forks engines, started when first needed.

    At most `processes` engines live at a time. All processes are gone when the block ends. Thread-safe.
    `limit_s` is the longest that loading or one simulation may take. `report` gets sentences about long waits, from any
    thread. `variables` are for the environment of the processes.
    """

    def __init__(
        self,
        source: WorkloadSource,
        *,
        processes: int = 2,
        limit_s: float = LIMIT_S,
        report: Callable[[str], None] = lambda text: None,
        variables: Mapping[str, str] = _NO_VARIABLES,
    ) -> None:
        self._source, self._limit_s, self._report, self._variables = source, limit_s, report, variables
        self._free = threading.BoundedSemaphore(processes)
        self._lock = threading.Lock()
        self._workers: dict[str, _Worker] = {}
        self._files: dict[str, dict[str, Stamp | None]] = {}  # by device
        self._ended = False
        self._stuck: SimulationFailed | None = None

    def __enter__(self) -> ProcessSimulator:
        return self

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._ended = True
            workers, self._workers = list(self._workers.values()), {}
        for worker in workers:
            worker.stop()

    def list_files(self, device: str) -> dict[str, Stamp | None]:
        """Return the files on which the answers about this device depend so far, as they were when they were read."""
        with self._lock:
            return dict(self._files.get(device, {}))

    def facts(self, device: str = "cuda", *, ranks: int = 1, machine: Machine | None = None) -> ModelFacts:
        """Facts of the model, without allocating weights; a script sees itself on `ranks` ranks.

        `machine` has the card that the model sees: it may compute in bf16 where that can.
        A script that refuses so few samples is asked with more of them. Raises SimulationFailed.
        """
        micro_batch = 1
        while True:
            try:
                with self._process(
                    ModelRequest(ranks=ranks, micro_batch=micro_batch, machine=machine), device
                ) as process:
                    return process.receive(ModelFacts)
            except SimulationFailed as failed:
                if not wants_larger_batch(failed.problem) or micro_batch >= LARGEST_SURVEY_BATCH:
                    raise
            micro_batch *= 2

    @contextlib.contextmanager
    def engine(self, spec: EngineSpec) -> Iterator[SimulatedEngine]:
        """An engine that lives until the block ends; waits while `processes` engines live."""
        with self._process(spec, spec.device) as engine:
            yield engine

    def _note_files(self, device: str, stamps: Mapping[str, Stamp | None]) -> None:
        with self._lock:
            self._files.setdefault(device, {}).update(stamps)

    @contextlib.contextmanager
    def _process(self, request: Request, device: str) -> Iterator[SimulatedEngine]:
        with self._free:
            if self._stuck is not None:  # it took minutes to find out; do not repeat that for each rung
                raise self._stuck
            with self._lock:
                if self._ended:  # meanwhile; a worker that starts now would never be stopped
                    raise SimulationFailed(kind="crashed", problem="the simulator was ended")
                if device not in self._workers:
                    self._workers[device] = _Worker(
                        self._source, device, self._limit_s, self._report, self._variables,
                        functools.partial(self._note_files, device),
                    )  # fmt: skip
                worker = self._workers[device]
            try:
                worker.wait_ready()  # outside the lock, so that another thread can stop it meanwhile
                driver_end, engine_end = socket.socketpair()
                with contextlib.closing(worker.speak_with(driver_end)) as engine:
                    worker.fork(request, engine_end)
                    yield engine
            except SimulationFailed as failed:
                if failed.kind == "stuck":
                    self._stuck = failed
                raise


class _Worker:
    """The prepared process of one device; it needs some ten seconds of imports until it is ready."""

    def __init__(
        self,
        source: WorkloadSource,
        device: str,
        limit_s: float,
        report: Callable[[str], None],
        variables: Mapping[str, str],
        note_files: _NoteFiles,
    ) -> None:
        self._limit_s, self._report, self._note_files = limit_s, report, note_files
        self._is_ready = False
        self._failed: SimulationFailed | None = None  # to load
        self.log: IO[bytes] = tempfile.TemporaryFile()
        temporary = variables.get("TMPDIR")
        self._scratch = private.make_folder("autods-sim-", temporary)  # the worker removes it, too
        self._socket, worker_end = socket.socketpair()
        self._lock = threading.Lock()
        # Engines inherit the write end, which closes with the last of them.
        self._engines_gone, inherited = os.pipe()
        python, *module = python_command(__name__.rpartition(".")[0] + ".worker")
        command = [python, "-W", "ignore", *module]
        arguments = [str(worker_end.fileno()), device, json.dumps(asdict(source)), str(self._scratch)]
        arguments += [] if temporary is None else [temporary]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(list_module_folders()), **variables}
        self._process = subprocess.Popen(
            command + arguments, pass_fds=[worker_end.fileno(), inherited], env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
        )  # fmt: skip
        worker_end.close()
        os.close(inherited)

    def wait_ready(self) -> None:
        """Wait until it is prepared. Raises SimulationFailed, at each call, if that failed."""
        with self._lock:
            if self._failed is not None:
                raise self._failed
            if self._is_ready:
                return
            try:
                self.wait_for(self._socket)
                _check(_read_answer(receive(self._socket), self._note_files), WorkloadReady, self.log)
            except SimulationFailed as failed:
                self._failed = failed
                raise
            self._is_ready = True

    def wait_for(self, connection: socket.socket) -> None:
        """Wait until the other end has sent something or is gone, and report long waits.

        Raises SimulationFailed when that takes too long, with the user's line where it is.
        """
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        loads = connection is self._socket
        pid, limit_s = self._process.pid, self._limit_s
        wait = Loading.of(pid, limit_s, self._report_wait) if loads else Wait(limit_s, self._report_wait)
        while not poll.poll(_POLL_MS):
            if wait.is_over():
                raise self._explain_wait()

    def _report_wait(self, waited_s: float) -> None:
        pid, stack = self._find_stack()
        self._report(f"a simulation has run for {waited_s:.0f} s: {stacks.describe_place(pid, stack)}")

    def _explain_wait(self) -> SimulationFailed:
        """The error after too long a wait: of the user's code if it is there, else of the machine."""
        pid, stack = self._find_stack()
        late, frame = f"has not come back for {self._limit_s:.0f} s", stacks.find_user_frame(stack)
        if frame is None:
            problem = f"the simulation {late}: {stacks.describe_place(pid, stack)}"
            return SimulationFailed(kind="crashed", problem=problem, hint=_LONGER)
        problem = f"{frame.function} {late}, in a simulation"
        return SimulationFailed(kind="stuck", problem=problem, place=str(frame), hint=_LONGER)

    def _find_stack(self) -> tuple[int, tuple[stacks.Frame, ...]]:
        """The newest process that is in the user's code, and its stack; else the newest; else the one that loads."""
        newest = None
        pids = [pid for pid in processes.list_session(self._process.pid) if pid != self._process.pid]
        for pid in reversed(pids):
            if stacks.find_user_frame(stack := stacks.read_stack(pid, self.log.fileno())):
                return pid, stack
            newest = newest or (stack and (pid, stack))
        return newest or (self._process.pid, stacks.read_stack(self._process.pid, self.log.fileno()))

    def speak_with(self, connection: socket.socket) -> SimulatedEngine:
        """Return the engine at the other end, whose process is to be forked."""
        return SimulatedEngine(connection, self.log, self.wait_for, self._note_files)

    def fork(self, request: Request, connection: socket.socket) -> None:
        """Fork a process for the request, which speaks on that socket."""
        with self._lock, connection, contextlib.suppress(OSError):
            send_request(self._socket, request, connection)

    def stop(self) -> None:
        """Kill it with its engines, which are in its session and process group, and wait until they are gone."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a file system that does not answer
            self._process.wait(_GONE_S)
        poll = select.poll()
        poll.register(self._engines_gone, select.POLLIN)
        poll.poll(_GONE_S * 1000)
        os.close(self._engines_gone)
        self._socket.close()
        self.log.close()
        shutil.rmtree(self._scratch, ignore_errors=True)


def _read_answer(messages: Iterator[Answer], note_files: _NoteFiles) -> Answer | None:
    """Return the next answer, after the files on which it depends; None where the peer is gone."""
    for message in messages:
        if not isinstance(message, FilesWereRead):
            return message
        note_files(message.stamps)
    return None


def _check(answer: object, kind: type[_Answer], log: IO[bytes]) -> _Answer:
    """The answer, if it is of this kind. Raises SimulationFailed for a failure, and for None: the process died."""
    if isinstance(answer, SimulationFailed):
        raise answer
    if answer is None:
        text = ""
        with contextlib.suppress(ValueError):  # it is closed: the simulator was ended by another thread
            size = os.fstat(log.fileno()).st_size
            text = clean(os.pread(log.fileno(), 20_000, max(0, size - 20_000)).decode(errors="replace"))
        lines = text.strip().splitlines()
        fatal = [line for line in lines if line.startswith("Fatal Python error")]
        last = (fatal or lines or ["it said nothing"])[-1]
        if fatal and (frame := stacks.find_crash(text)) is not None:
            hint = "this line, or a library in C that it calls, ended the process"
            raise SimulationFailed(kind="user_code", problem=last, place=str(frame), hint=hint)
        hint = "did the workload call os._exit, or did somebody end it?"
        raise SimulationFailed(kind="crashed", problem=f"the simulation's process died: {last}", hint=hint)
    assert isinstance(answer, kind), f"expected {kind.__name__}, got {type(answer).__name__}"
    return answer
