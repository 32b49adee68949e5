"""The agent of a node: its zygote, the jobs that it passes on, and what it knows of its machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autods.rank.job import RankJob
from autods.runner import agent as agent_module
from autods.runner.agent import NodeAgent, ZygoteProcess, digest_file, start_zygote
from autods.runner.node_messages import Heartbeat, LoadFailed, Ready, ZygoteDied, encode
from autods.system import processes
from tests.support.ends import JOB, report_of, spare_present_children
from tests.support.scripted_nvml import FakeCard, FakeNvml
from tests.support.stuck import hang_on_import, make_python
from tests.support.watching import is_running

# A process that greets as a zygote does, and ends when the other end hangs up.
WAITS = f"""
import socket, sys
connection = socket.socket(fileno=int(sys.argv[1]))
connection.sendall({encode(Ready(pid=1))!r})
sys.stdout.buffer.write(connection.recv(1 << 16))
sys.stdout.flush()
connection.recv(1)
sys.exit(3)
"""


@pytest.fixture(autouse=True)
def spared(monkeypatch: pytest.MonkeyPatch) -> None:
    spare_present_children(monkeypatch)


@pytest.fixture
def zygote() -> Iterator[ZygoteProcess]:
    with running(WAITS) as zygote:
        yield zygote


@contextlib.contextmanager
def running(code: str) -> Iterator[ZygoteProcess]:
    connection, peer = socket.socketpair()
    with peer:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(peer.fileno())], pass_fds=[peer.fileno()], stdout=subprocess.PIPE
        )
    with connection, process:
        yield ZygoteProcess(process=process, connection=connection)
        process.kill()


def an_agent() -> NodeAgent:
    return NodeAgent(JOB.source, "cpu", 1, "another machine", "log", {})


def test_an_agent_tells_of_cards_before_and_while_ranks_train(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([FakeCard(), FakeCard(uuid="GPU-b", reasons=0x20)])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    agent = NodeAgent(JOB.source, "cuda", 1, "another machine", "log", {})
    (finding,) = agent.examine(2).findings
    assert finding.text == "card 1 (A Card) is throttled: too hot"
    assert agent.progress().throttled == ()  # no ranks use them
    agent.job = JOB
    assert agent.progress().throttled == (str(finding),)
    nvml.cards = ()
    assert agent.progress().throttled == (str(finding),)  # it is not asked at each heartbeat
    assert nvml.open == 0


def test_a_zygote_ends_when_its_agent_closes_the_connection(zygote: ZygoteProcess) -> None:
    assert zygote.receive(60) == Ready(pid=1)
    assert zygote.close() == 3


def test_a_zygote_that_was_killed_sends_nothing_more(zygote: ZygoteProcess) -> None:
    assert zygote.receive(60) == Ready(pid=1)
    os.kill(zygote.process.pid, signal.SIGKILL)
    assert zygote.receive(60) is None
    zygote.send(b"a job that nobody hears")
    assert zygote.close() == -signal.SIGKILL


@pytest.mark.parametrize(("at_disk_s", "hears"), [(60.0, True), (0.0, False)])
def test_a_zygote_at_a_disk_that_does_not_answer_has_longer(
    monkeypatch: pytest.MonkeyPatch, at_disk_s: float, hears: bool
) -> None:
    """A file server that is away for minutes must not end a run of weeks."""
    connection, peer = socket.socketpair()
    process: Any = SimpleNamespace(pid=os.getpid())
    looks: list[int] = []

    def wait_for_disk(pid: int) -> bool:
        looks.append(pid)
        if len(looks) == 3:
            peer.sendall(encode(Ready(pid=1)))
        return True

    monkeypatch.setattr(processes, "waits_for_disk", wait_for_disk)
    monkeypatch.setattr(ZygoteProcess, "read_stack", lambda zygote: ())
    with connection, peer:
        zygote = ZygoteProcess(process=process, connection=connection)
        assert zygote.receive(0.1, at_disk_s=at_disk_s) == (Ready(pid=1) if hears else None)
    assert zygote.overdue_s == (None if hears else 0.1)


def test_an_abort_of_one_job_never_meets_the_next() -> None:
    """It comes when that job has ended by itself: the zygote does not even hear it."""
    connection, peer = socket.socketpair()
    node = an_agent()
    process: Any = None
    node.zygote = ZygoteProcess(process=process, connection=connection)
    report = report_of()
    peer.sendall(encode(Heartbeat(phase="forward", step=1)) + encode(report))
    assert node.run(JOB, 1) == report
    node.abort(1)
    peer.sendall(encode(report))
    node.run(JOB, 2)
    assert peer.recv(1 << 16).count(b"abort") == 0
    for end in (connection, peer):
        end.close()


def test_a_job_has_a_private_folder_until_it_ends(zygote: ZygoteProcess) -> None:
    """It ends with a zygote that was killed, too, which cannot remove it any more."""
    node = an_agent()
    assert zygote.receive(60) == Ready(pid=1)
    node.zygote = zygote
    with ThreadPoolExecutor(1) as threads:
        died = threads.submit(node.run, JOB, 1)
        assert zygote.process.stdout is not None
        job = RankJob.from_json(zygote.process.stdout.readline().decode())
        folder = Path(job.private)
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "store").touch()
        zygote.process.kill()
        assert isinstance(died.result(), ZygoteDied)
    assert not folder.exists()


def test_a_zygote_stopped_amid_a_job_has_the_time_of_that_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends its ranks, which may have much memory to give back, and removes their files."""
    monkeypatch.setattr(agent_module, "_CLOSE_S", 0.1)
    node = an_agent()
    with running(WAITS.replace("sys.exit(3)", "import time\ntime.sleep(1)\nsys.exit(3)")) as zygote:
        assert zygote.receive(60) == Ready(pid=1)
        node.zygote = zygote
        with ThreadPoolExecutor(1) as threads:
            died = threads.submit(node.run, JOB, 1)
            assert zygote.process.stdout is not None
            zygote.process.stdout.readline()
            node.stop()
            death = died.result()
    assert isinstance(death, ZygoteDied)
    assert death.how == "exit 3"


def test_a_file_counts_as_seen_only_if_it_is_the_same(tmp_path: Path) -> None:
    here = tmp_path / "model.py"
    here.write_text("one")
    same, folder = digest_file(str(here)), str(tmp_path)
    assert same is not None
    node, gone = an_agent(), str(tmp_path / "gone")
    assert node.find_missing({str(here): same}, [folder]) == []
    assert node.find_missing({str(here): "of another text"}, [folder]) == [str(here)]
    assert node.find_missing({gone: same}, [folder, "/nowhere"]) == [gone, "/nowhere"]


# An agent on a node of a cluster, with a process that sleeps in place of the zygote, whose pid it prints.
ON_A_NODE = """
import subprocess, sys, time
from pathlib import Path
from types import SimpleNamespace
from autods.runner import agent, cleanup
from autods.types import WorkloadSource
cleanup.ROOT, cleanup.GRACE_S = Path(sys.argv[1]), 0.0
def start_zygote(source, device, driver_pid, log, environment, plain):
    print(subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True).pid, flush=True)
    time.sleep(600)
agent.start_zygote = start_zygote
source = WorkloadSource(kind="file", path="model.py", name="model", digest="")
agent.NodeAgent(source, "cpu", 1, "another machine", "log", {"AUTODS_SESSION": "/tmp/of-that-machine"}, True).start()
"""


def test_an_agent_on_another_machine_has_a_guard_of_its_own(tmp_path: Path) -> None:
    agent = subprocess.Popen([sys.executable, "-c", ON_A_NODE, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    zygote = int(agent.stdout.readline())
    os.kill(zygote, signal.SIGSTOP)
    agent.kill()
    agent.communicate()
    until = time.monotonic() + 30
    while is_running(zygote) or list(tmp_path.iterdir()):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_an_import_that_never_ends_is_the_codes_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = hang_on_import(tmp_path)
    monkeypatch.setattr(sys, "executable", make_python(tmp_path, source))
    agent = NodeAgent(source, "cpu", 1, "another machine", str(tmp_path / "log"), dict(os.environ), load_s=2.0)
    answer = agent.start()
    assert isinstance(answer, LoadFailed)
    assert answer.error.contract == f"{source.path}:5: its import has not gone on for 2 s, in wait"


def test_a_zygote_that_says_nothing_is_ended_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = hang_on_import(tmp_path)
    monkeypatch.setattr(sys, "executable", make_python(tmp_path, source))
    monkeypatch.setattr(agent_module, "_SILENT_S", 2.0)
    agent = NodeAgent(source, "cpu", 1, "another machine", str(tmp_path / "log"), dict(os.environ))
    agent.zygote = start_zygote(source, "cpu", 0, agent.log, dict(os.environ))
    answer = agent.bind_store("127.0.0.1")
    assert isinstance(answer, ZygoteDied)
    assert answer.how == f"it said nothing for 2 s, in wait, {source.path}:5"


def test_a_zygote_that_stays_stopped_is_ended_at_its_limit(zygote: ZygoteProcess) -> None:
    assert zygote.receive(60) == Ready(pid=1)
    os.kill(zygote.process.pid, signal.SIGSTOP)
    assert zygote.receive(1) is None
    assert "stopped" in zygote.locate()
    assert zygote.close(0.0) == -signal.SIGKILL
