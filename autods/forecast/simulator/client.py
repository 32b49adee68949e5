"""The simulator as the rest of autods sees it: starts the worker, sends requests and reads answers. No torch."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import IO, TypeVar

from ...errors import AutodsError
from ...types import Device, ModelFacts, WorkloadSource
from .. import values
from ..values import EngineSpec, Simulation
from .protocol import Failure, ModelRequest, Ready, Request, receive, send

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
        self._answers = receive(connection)

    def measure(self, micro_batch: int) -> Simulation:
        """Run a micro batch. The first call initialises the engine and runs two steps; later ones run one step.

        Raises SimulationFailed.
        """
        send(self._connection, micro_batch)
        return self.receive(Simulation)

    def receive(self, kind: type[_Answer]) -> _Answer:
        """The process's next answer. Raises SimulationFailed."""
        return _check(next(self._answers, None), kind, self._log)

    def close(self) -> None:
        """End it: its process ends with the connection. Another thread that waits for an answer gets none."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(ValueError):  # that thread is in it, and ends it
            self._answers.close()  # it reads through a file, which would keep the connection open
        self._connection.close()


class Simulator(values.Simulator):
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

    def __exit__(self, *raised: object) -> None:
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

    @contextlib.contextmanager
    def engine(self, spec: EngineSpec) -> Iterator[SimulatedEngine]:
        """An engine that lives until the block ends; waits while `processes` engines live."""
        with self._process(spec, spec.device) as engine:
            yield engine

    @contextlib.contextmanager
    def _process(self, request: Request, device: Device) -> Iterator[SimulatedEngine]:
        with self._free:
            if self._stuck is not None:  # it took minutes to find out; do not repeat that for each rung
                raise self._stuck
            with self._lock:
                if device not in self._workers:
                    self._workers[device] = _Worker(self._source, device)
                worker = self._workers[device]
            worker.wait_ready()  # outside the lock, so that another thread can stop it meanwhile
            driver_end, engine_end = socket.socketpair()
            engine = SimulatedEngine(driver_end, worker.log)
            try:
                worker.fork(request, engine_end)
                yield engine
            except SimulationFailed as failed:
                if failed.kind == "stuck":
                    self._stuck = failed
                raise
            finally:
                engine.close()


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
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}  # as we import
        self._process = subprocess.Popen(
            command + arguments, pass_fds=[worker_end.fileno(), inherited], env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
        )  # fmt: skip
        worker_end.close()
        os.close(inherited)

    @functools.cached_property
    def _first_answer(self) -> object:
        return next(receive(self._socket), None)

    def wait_ready(self) -> None:
        """Wait until it is prepared. Raises SimulationFailed, at each call, if that failed."""
        with self._lock:
            _check(self._first_answer, Ready, self.log)

    def fork(self, request: Request, connection: socket.socket) -> None:
        """Fork a process for the request, which speaks on that socket."""
        with self._lock, connection, contextlib.suppress(OSError):
            socket.send_fds(self._socket, [pickle.dumps(request)], [connection.fileno()])

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


def _check(answer: object, kind: type[_Answer], log: IO[bytes]) -> _Answer:
    """The answer, if it is of this kind. Raises SimulationFailed for a failure, and for None: the process died."""
    if isinstance(answer, Failure):
        raise SimulationFailed(**asdict(answer))
    if answer is None:
        size = os.fstat(log.fileno()).st_size
        lines = os.pread(log.fileno(), 20_000, max(0, size - 20_000)).decode(errors="replace").strip().splitlines()
        fatal = [line for line in lines if line.startswith("Fatal Python error")]
        last = (fatal or lines or ["it said nothing"])[-1]
        raise SimulationFailed(kind="crashed", problem=f"the simulation's process died: {last}")
    assert isinstance(answer, kind), f"expected {kind.__name__}, got {type(answer).__name__}"
    return answer
