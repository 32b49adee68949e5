"""The client needs no torch, and its failures say where, what and how to fix it."""

from __future__ import annotations

import io
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from autods.forecast.simulate import SimulationFailed
from autods.forecast.simulate.client import ProcessSimulator, SimulatedEngine
from autods.forecast.simulate.protocol import send
from autods.system import waiting
from autods.types import ModelFacts
from tests.support.stuck import hang_on_import, make_python
from tests.support.watching import wait_for


def test_the_client_imports_no_torch() -> None:
    code = "import sys, autods.forecast.simulate; sys.exit(bool({'torch', 'deepspeed'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_failure_says_where_what_and_how_to_fix_it() -> None:
    failed = SimulationFailed(kind="user_code", problem="ValueError: no", place="model.py:3", hint="give it a yes")
    assert str(failed) == "model.py:3: ValueError: no\n  give it a yes"


def test_an_engine_that_failed_leaves_no_connection_open() -> None:
    ours, theirs = socket.socketpair()
    engine = SimulatedEngine(ours, io.BytesIO())
    send(theirs, SimulationFailed(kind="engine", problem="AssertionError: no"))
    with theirs, pytest.raises(SimulationFailed) as failed:
        engine.receive(ModelFacts)
    engine.close()
    assert ours.fileno() == -1  # though the exception's traceback still holds the engine
    assert failed.tb is not None


def test_an_engine_closes_while_another_thread_waits_for_it() -> None:
    ours, theirs = socket.socketpair()
    with theirs, tempfile.TemporaryFile() as log, ThreadPoolExecutor(1) as pool:
        engine = SimulatedEngine(ours, log)
        waiting = pool.submit(engine.receive, ModelFacts)
        wait_for(waiting.running, 10)
        engine.close()
        assert isinstance(waiting.exception(10), SimulationFailed)


def test_an_import_that_never_ends_ends_the_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = hang_on_import(tmp_path)
    monkeypatch.setattr(sys, "executable", make_python(tmp_path, source))
    monkeypatch.setattr(waiting, "FIRST_S", 1.0)
    reports: list[str] = []
    with ProcessSimulator(source, limit_s=2.0, report=reports.append) as simulator:
        for _ in range(2):  # the second waits for nothing
            with pytest.raises(SimulationFailed, match=f"{source.path}:5: wait has not come back for 2 s"):
                simulator.facts()
    assert reports == [f"a simulation has run for 1 s: in wait, {source.path}:5"]


def test_an_ended_simulator_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    simulator = ProcessSimulator(hang_on_import(tmp_path))
    with simulator:
        pass
    with pytest.raises(SimulationFailed, match="the simulator was ended"):
        simulator.facts()
