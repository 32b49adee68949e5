"""The simulator as the rest of autods sees it: starts the worker, sends requests and reads answers. No torch."""

from __future__ import annotations

import contextlib
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
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import IO, TypeVar

from ...errors import AutodsError
from ...types import Device, ModelFacts, WorkloadSource
from ..values import EngineSpec, Simulation
from .protocol import EngineRequest, Failure, MeasureRequest, ModelRequest, Ready, decode, encode, send

_GONE_S = 5.0  # the longest that killed engines take to end, on a very busy machine
_Answer = TypeVar("_Answer", Ready, ModelFacts, Simulation)


class SimulationFailed(AutodsError):
    """A simulation ended without a result. The message is one or two lines for a person.

    `kind` is one of these words:

    `no_compiler`, `build_failed`: the simulated device cannot be built.
    `user_code`: the workload raised an exception.
    `data_dependent`: shapes depend on values.
    `unsupported`: an operator has no fake implementation.
    `engine`: DeepSpeed refused the config.
    `stuck`: a script did not reach its second step.
    `crashed`: the process died.
    """

    def __init__(self, *, kind: str, problem: str, place: str | None = None, hint: str | None = None) -> None:
        self.kind, self.problem, self.place, self.hint = kind, problem, place, hint
        line = f"{place}: {problem}" if place else problem
        super().__init__(f"{line}\n  {hint}" if hint else line)


class SimulatedEngine:
    """A running engine in a separate process."""

    def __init__(self, connection: socket.socket, log: IO[bytes]) -> None:
        self._connection, self._log = connection, log
        self._lines = connection.makefile("rb")

    def measure(self, micro_batch: int) -> Simulation:
        """Run a micro batch. The first call initialises the engine and runs two steps; later ones run one step.

        Raises SimulationFailed.
        """
        send(self._connection, MeasureRequest(micro_batch=micro_batch))
        return self.receive(Simulation)

    def receive(self, kind: type[_Answer]) -> _Answer:
        """The process's next answer. Raises SimulationFailed."""
        try:
            line = self._lines.readline()
        except OSError:  # it died before it read our request
            line = b""
        return _answer(line, kind, self._log)


class Simulator:
    """The simulated device for one workload: a prepared process that forks engines, started when first needed.

    At most `processes` engines live at a time. All processes are gone when the block ends. Thread-safe.
    """

    def __init__(self, source: WorkloadSource, *, processes: int = 2) -> None:
        self._source = source
        self._free = threading.BoundedSemaphore(processes)
        self._lock = threading.Lock()
        self._workers: dict[Device, _Worker] = {}
        self._stuck: SimulationFailed | None = None

    def __enter__(self) -> Simulator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            workers, self._workers = list(self._workers.values()), {}
        for worker in workers:
            worker.stop()

    def facts(self, device: Device = "cuda", *, ranks: int = 1) -> ModelFacts:
        """Facts of the model, without allocating weights; a script sees itself on `ranks` ranks.

        Raises SimulationFailed.
        """
        with self._process(ModelRequest(ranks=ranks), device) as process:
            return process.receive(ModelFacts)

    def simulate(self, spec: EngineSpec, micro_batches: Sequence[int]) -> tuple[Simulation, ...]:
        """Run each micro batch in turn on one engine. Raises SimulationFailed."""
        with self.engine(spec) as engine:
            return tuple(engine.measure(micro_batch) for micro_batch in micro_batches)

    @contextlib.contextmanager
    def engine(self, spec: EngineSpec) -> Iterator[SimulatedEngine]:
        """An engine that lives until the block ends; waits while `processes` engines live."""
        with self._process(EngineRequest(engine=spec), spec.device) as engine:
            yield engine

    @contextlib.contextmanager
    def _process(self, request: ModelRequest | EngineRequest, device: Device) -> Iterator[SimulatedEngine]:
        with self._free:
            if self._stuck is not None:  # it took minutes to find out; do not repeat that for each rung
                raise self._stuck
            worker = self._worker(device)
            driver_end, engine_end = socket.socketpair()
            try:
                worker.fork(request, engine_end)
                yield SimulatedEngine(driver_end, worker.log)
            except SimulationFailed as failed:
                if failed.kind == "stuck":
                    self._stuck = failed
                raise
            finally:
                driver_end.close()

    def _worker(self, device: Device) -> _Worker:
        with self._lock:
            if device not in self._workers:
                self._workers[device] = _Worker(self._source, device)
            worker = self._workers[device]
        worker.wait_ready()  # outside the lock, so that another thread can stop it meanwhile
        return worker


class _Worker:
    """The prepared process of one device; it needs some ten seconds of imports until it is ready."""

    def __init__(self, source: WorkloadSource, device: Device) -> None:
        self.log: IO[bytes] = tempfile.TemporaryFile()
        self._scratch = tempfile.mkdtemp(prefix="autods-simulated-")  # the worker removes it if we cannot
        self._socket, worker_end = socket.socketpair()
        self._lock = threading.Lock()
        # Engines inherit the write end, which closes with the last of them.
        self._engines_gone, inherited = os.pipe()
        command = [sys.executable, "-W", "ignore", "-m", __name__.rpartition(".")[0] + ".worker"]
        arguments = [str(worker_end.fileno()), device, json.dumps(asdict(source)), self._scratch]
        self._process = subprocess.Popen(
            command + arguments, pass_fds=[worker_end.fileno(), inherited], env=_environment(), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
        )  # fmt: skip
        worker_end.close()
        os.close(inherited)
        self._first_line: bytes | None = None

    def wait_ready(self) -> None:
        """Wait until it is prepared. Raises SimulationFailed, at each call, if that failed."""
        with self._lock:
            if self._first_line is None:
                with self._socket.makefile("rb") as lines:
                    self._first_line = lines.readline()
            _answer(self._first_line, Ready, self.log)

    def fork(self, request: ModelRequest | EngineRequest, connection: socket.socket) -> None:
        """Fork a process for the request, which speaks on that socket."""
        with self._lock, connection, contextlib.suppress(OSError):
            socket.send_fds(self._socket, [encode(request)], [connection.fileno()])

    def stop(self) -> None:
        """Kill it with its engines, which are in its session and process group, and wait until they are gone."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        poll = select.poll()
        poll.register(self._engines_gone, select.POLLIN)
        poll.poll(_GONE_S * 1000)
        os.close(self._engines_gone)
        self._socket.close()
        shutil.rmtree(self._scratch, ignore_errors=True)


def _answer(line: bytes, kind: type[_Answer], log: IO[bytes]) -> _Answer:
    """The answer in that line. Raises SimulationFailed for a failure, and for an end of the stream."""
    if not line:
        raise SimulationFailed(kind="crashed", problem=f"the simulation's process died: {_tail(log)}")
    message = decode(line)
    if isinstance(message, Failure):
        raise SimulationFailed(**asdict(message))
    assert isinstance(message, kind), f"expected {kind.__name__}, got {type(message).__name__}"
    return message


def _tail(log: IO[bytes]) -> str:
    size = os.fstat(log.fileno()).st_size
    lines = os.pread(log.fileno(), 20_000, max(0, size - 20_000)).decode(errors="replace").strip().splitlines()
    fatal = [line for line in lines if line.startswith("Fatal Python error")]
    return (fatal or lines or ["it said nothing"])[-1]


def _environment() -> dict[str, str]:
    """The worker finds the same modules as we do."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
