"""The side of the simulated device that asks: starts the worker, sends asks, reads what was allocated. No torch."""

from __future__ import annotations

import base64
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
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import IO, Any

from ...errors import AutodsError
from ...types import Device, ModelFacts, WorkloadSource
from ..values import EngineSpec, Simulation, Trace

_GONE_S = 5.0  # killed engines are gone at once, but on a machine that is very busy


class SimulationFailed(AutodsError):
    """It cannot be simulated. The message is one or two lines for a person.

    kind: no_compiler, build_failed (the simulated device cannot be had), user_code (the workload raised),
    data_dependent (its shapes depend on values), unsupported (an operator without a fake implementation), engine
    (DeepSpeed refused), stuck (a script did not come to its second step), crashed (the process died).
    """

    def __init__(self, *, kind: str, what: str, where: str | None = None, hint: str | None = None) -> None:
        self.kind, self.what, self.where, self.hint = kind, what, where, hint
        line = f"{where}: {what}" if where else what
        super().__init__(f"{line}\n  {hint}" if hint else line)


class SimulatedEngine:
    """An engine that is alive: each `measure` runs one more micro batch on it."""

    def __init__(self, connection: socket.socket, log: IO[bytes]) -> None:
        self._connection, self._log = connection, log
        self._lines = connection.makefile("rb")

    def measure(self, micro_batch: int) -> Simulation:
        """The first call initialises the engine and runs two steps; later ones run a step. Raises SimulationFailed."""
        return _simulated(self._ask({"measure": micro_batch})["simulated"])

    def _ask(self, question: dict[str, Any] | None) -> dict[str, Any]:
        if question is not None:
            with contextlib.suppress(OSError):
                self._connection.sendall(json.dumps(question).encode() + b"\n")
        try:
            line = self._lines.readline()
        except OSError:  # it died with our question unread
            line = b""
        return _answer(line, self._log)


class Simulator:
    """A prepared process for one workload, started when first needed. Thread-safe.

    processes: how many engines run at a time. On exit every process is gone.
    """

    def __init__(self, source: WorkloadSource, *, processes: int = 2) -> None:
        self._source, self._processes = source, processes
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
        """What a look at the model finds; no weight is allocated. ranks: in which a script sees itself. Raises
        SimulationFailed."""
        with self._process({"facts": True, "ranks": ranks}, device) as process:
            return ModelFacts(**process._ask(None)["facts"])

    def simulate(self, ask: EngineSpec, micro_batches: Sequence[int]) -> tuple[Simulation, ...]:
        """Each micro batch in turn on one engine. Raises SimulationFailed."""
        with self.engine(ask) as engine:
            return tuple(engine.measure(micro_batch) for micro_batch in micro_batches)

    @contextlib.contextmanager
    def engine(self, ask: EngineSpec) -> Iterator[SimulatedEngine]:
        """An engine that lives until the block ends; waits until fewer than `processes` do."""
        with self._process({"engine": asdict(ask)}, ask.device) as engine:
            yield engine

    @contextlib.contextmanager
    def _process(self, job: dict[str, Any], device: Device) -> Iterator[SimulatedEngine]:
        with self._free:
            if self._stuck is not None:  # minutes were waited for nothing: not again for each rung
                raise self._stuck
            worker = self._worker(device)
            ours, theirs = socket.socketpair()
            try:
                worker.fork(job, theirs)
                yield SimulatedEngine(ours, worker.log)
            except SimulationFailed as failed:
                if failed.kind == "stuck":
                    self._stuck = failed
                raise
            finally:
                ours.close()

    def _worker(self, device: Device) -> _Worker:
        with self._lock:
            if device not in self._workers:
                self._workers[device] = _Worker(self._source, device)
            worker = self._workers[device]
        worker.wait_ready()  # outside the lock: whoever leaves must be able to stop it meanwhile
        return worker


class _Worker:
    """The prepared process; until it is ready some ten seconds of imports pass."""

    def __init__(self, source: WorkloadSource, device: Device) -> None:
        self.log: IO[bytes] = tempfile.TemporaryFile()
        self._scratch = tempfile.mkdtemp(prefix="autods-simulated-")  # the worker removes it when we cannot
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self._lives, alive = os.pipe()  # engines inherit the other end, which closes with the last of them
        command = [sys.executable, "-W", "ignore", "-m", __name__.rpartition(".")[0] + ".worker"]
        told = [str(theirs.fileno()), device, json.dumps(asdict(source)), self._scratch]
        self._process = subprocess.Popen(
            command + told, pass_fds=[theirs.fileno(), alive], env=_environment(), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
        )  # fmt: skip
        theirs.close()
        os.close(alive)
        self._said: bytes | None = None

    def wait_ready(self) -> None:
        """Raises SimulationFailed, each time it is asked, when it cannot be prepared."""
        with self._lock:
            if self._said is None:
                with self._socket.makefile("rb") as lines:
                    self._said = lines.readline()
            _answer(self._said, self.log)

    def fork(self, job: dict[str, Any], theirs: socket.socket) -> None:
        """A new engine's process, which speaks on that socket."""
        with self._lock, theirs, contextlib.suppress(OSError):
            socket.send_fds(self._socket, [json.dumps(job).encode() + b"\n"], [theirs.fileno()])

    def stop(self) -> None:
        """Nothing of it is left running: its engines are in its session and its process group."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        last = select.poll()
        last.register(self._lives, select.POLLIN)
        last.poll(_GONE_S * 1000)
        os.close(self._lives)
        self._socket.close()
        shutil.rmtree(self._scratch, ignore_errors=True)


def _answer(line: bytes, log: IO[bytes]) -> dict[str, Any]:
    if not line:
        raise SimulationFailed(kind="crashed", what=f"the simulation's process died: {_tail(log)}")
    said: dict[str, Any] = json.loads(line)
    if "failed" in said:
        raise SimulationFailed(**said["failed"])
    return said


def _tail(log: IO[bytes]) -> str:
    size = os.fstat(log.fileno()).st_size
    lines = os.pread(log.fileno(), 20_000, max(0, size - 20_000)).decode(errors="replace").strip().splitlines()
    fatal = [line for line in lines if line.startswith("Fatal Python error")]
    return (fatal or lines or ["it said nothing"])[-1]


def _environment() -> dict[str, str]:
    """The worker finds the same modules as we do."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _simulated(said: dict[str, Any]) -> Simulation:
    traces = {}
    for tier, packed in said.pop("traces").items():
        events = array("q", base64.b64decode(packed["events"]))
        traces[tier] = Trace(
            events=events,
            marks=tuple((count, phase) for count, phase in packed["marks"]),
            unrounded=frozenset(packed.get("unrounded", ())),
            emptied=tuple(packed.get("emptied", ())),
            copied=tuple((count, size) for count, size in packed.get("copied", ())),
        )
    assumed = tuple(said.pop("assumed"))
    return Simulation(traces=traces, assumed=assumed, **said)
