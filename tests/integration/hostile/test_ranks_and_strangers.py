"""What another user of the machine gets from the ranks of a trial, and from planting what autods executes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from autods.rank.job import RankJob
from autods.runner.agent import NodeAgent
from autods.runner.node_messages import NodeReport, Ready
from autods.system.processes import machine_id
from autods.workload import make_source
from tests.support.ends import spare_present_children
from tests.support.hostile import Case, OtherUser, each
from tests.support.watching import wait_for

MODEL = """
import time
from pathlib import Path
import torch

FOLDER = Path(__file__).parent


class Held(torch.nn.Linear):
    def forward(self, x):
        (FOLDER / "held").touch()
        while (FOLDER / "hold").exists():
            time.sleep(0.02)
        return super().forward(x).sum()


def build_model():
    return Held(8, 8)


def build_batch(micro_batch_size):
    return (torch.randn(micro_batch_size, 8),)
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


@dataclass(frozen=True, slots=True)
class HeldJob:
    """Two ranks that wait in their first forward. `private` is their folder, `ports` are those that they listen on."""

    private: Path
    ports: tuple[int, ...]
    report: Future[object]
    hold: Path


@pytest.fixture(scope="module")
def spared() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        spare_present_children(patch)
        yield


@pytest.fixture(scope="module")
def held(spared: None, other: OtherUser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeldJob]:
    folder = tmp_path_factory.mktemp("held")
    model, hold = folder / "model.py", folder / "hold"
    model.write_text(MODEL)
    hold.touch()
    source = make_source(model)
    agent = NodeAgent(source, "cpu", os.getpid(), machine_id(), str(folder / "zygote.log"), dict(os.environ))
    assert isinstance(agent.start(), Ready)
    job = RankJob(
        job="train", source=source, device="cpu", folder=str(folder / "logs"), scratch=str(folder / "scratch"),
        world_size=2, local_ranks=(0, 1), ds_config=CONFIG,
    )  # fmt: skip
    with ThreadPoolExecutor(1) as threads:
        report = threads.submit(agent.run, job, 1)
        try:
            wait_for(lambda: (folder / "held").exists() or report.done(), 100)
            assert agent.zygote is not None
            ranks = psutil.Process(agent.zygote.process.pid).children()
            listening = [c for rank in ranks for c in rank.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
            assert agent.job is not None
            ports = tuple(connection.laddr.port for connection in listening)
            yield HeldJob(Path(agent.job.private), ports, report, hold)
        finally:
            hold.unlink(missing_ok=True)
            report.result(100)
            agent.stop()


def test_a_stranger_cannot_enter_the_ranks_folder(held: HeldJob, other: OtherUser) -> None:
    attempts = """
import os, sys
folder, store = sys.argv[1:]
for attempt in (
    lambda: os.listdir(folder),
    lambda: open(store, "rb"),
    lambda: open(store, "ab"),
    lambda: os.symlink("/etc/passwd", folder + "/tmp7"),
    lambda: os.rename(folder, folder + "x"),
    lambda: os.rmdir(folder),
):
    try:
        print(attempt())
    except OSError as error:
        print(type(error).__name__)
"""
    (store,) = held.private.glob("store-*")
    assert other.python(attempts, held.private, store).stdout.split() == ["PermissionError"] * 6


# Asks for the number of keys as TCPStore's clients do, and says whether anything answers.
ASK = """
import encodings.idna, socket, struct, sys
for port in sys.argv[1:]:
    with socket.create_connection(("127.0.0.1", int(port)), 5) as connection:
        connection.settimeout(1)
        connection.sendall(struct.pack("=BIB", 0, 0x3C85F7CE, 7))
        try:
            print(len(connection.recv(8)))
        except OSError:
            print("silence")
"""


def test_no_port_of_the_ranks_is_a_store(held: HeldJob, other: OtherUser) -> None:
    """What listens is gloo's. It reads eight bytes from each connection, and the ranks go on."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert other.python(ASK, store.port).stdout.split() == ["8"]
    assert held.ports
    assert set(other.python(ASK, *held.ports).stdout.split()) <= {"silence", "0"}
    held.hold.unlink()
    report = held.report.result(100)
    assert isinstance(report, NodeReport)
    assert all(rank.succeeded for rank in report.ranks)
    assert not held.private.exists()


def stranger(path: Path) -> None:
    """A folder of another user."""
    path.mkdir()
    os.chown(path, 2_000_000_001, -1)


def everybodys(path: Path) -> None:
    """A folder of ours to which everybody may write."""
    path.mkdir()
    path.chmod(0o777)


OBJECT = "autods.Workload(build_model=int, build_batch=int)"
FIT = f"autods.find_best_config({OBJECT}, gpus=2, device='cpu', gpu_memory='1GiB', out='out')"
REAL = "fit model.py --device cpu --gpus 2 --gpu-memory 1GiB --no-forecast"
PLANTED = {
    "a pickle in a stranger's folder": Case(
        FIT, 2, "out/workload belongs to uid 2000000001, and its content would be executed", "api",
        files={"out/workload": stranger}, leaves=("out",), needs="root",
    ),
    "a pickle where all may write": Case(
        FIT, 2, "every user may write to", "api", files={"out/workload": everybodys}, leaves=("out",)
    ),
    "a cache of a stranger's": Case(
        REAL, 3, "cache belongs to uid 2000000001, and code that is cached", "real",
        files={"cache": stranger}, env={"AUTODS_CACHE": "cache"}, leaves=("autods-out",), needs="root",
    ),
    "a cache where all may write": Case(
        REAL, 3, "every user may write to", "real",
        files={"cache": everybodys}, env={"AUTODS_CACHE": "cache"}, leaves=("autods-out",),
    ),
}  # fmt: skip


@each(PLANTED)
def test_planted_code_is_refused(meet, case):
    meet(case)
