"""The environment of a rank, and its heartbeats."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autods.rank.job import Beat, Heartbeats, RankJob
from autods.rank.memory import Meter
from autods.rank.worker import Observer, environment
from autods.types import PHASES, WorkloadSource

SOURCE = WorkloadSource(kind="file", path="/home/me/model.py", name="model", digest="abc")


def job(device: str, ranks: int = 2) -> RankJob:
    return RankJob(
        job="train", source=SOURCE, device=device, folder="/f", scratch="/s", world_size=ranks,
        local_ranks=tuple(range(ranks)),
    )  # fmt: skip


def test_a_rank_gets_its_share_of_the_cores_or_the_users_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autods.rank.worker.count_cores", lambda: 16)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the zygote's
    assert environment(job("cuda"), 0, 1)["OMP_NUM_THREADS"] == "8"
    assert environment(job("cpu", 32), 0, 1)["OMP_NUM_THREADS"] == "1"
    assert environment(replace(job("cuda"), threads=4), 0, 1)["MKL_NUM_THREADS"] == "4"


def test_nccl_finds_its_network_and_gloo_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's address may be that of a slow network for management."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("autods.rank.worker.find_interface", lambda address: "eth0")
    part = replace(job("cuda"), master_address="10.0.0.1", node_address="10.0.0.2")
    variables = environment(part, 0, 1)
    assert "NCCL_SOCKET_IFNAME" not in variables
    assert variables["GLOO_SOCKET_IFNAME"] == "eth0"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib1")
    variables = environment(part, 0, 1)
    assert (variables["NCCL_SOCKET_IFNAME"], variables["GLOO_SOCKET_IFNAME"]) == ("ib0", "ib1")


class SettlingMeter(Meter):
    def __init__(self) -> None:
        self.settled = 0

    def settle(self) -> None:
        self.settled += 1


def test_the_meter_settles_after_each_part_that_happens_once() -> None:
    meter, board = SettlingMeter(), Heartbeats.create(1)
    observer = Observer(board, 0, meter)
    settled = {}
    for phase in PHASES[1:4]:  # rendezvous, build, init
        observer(phase, 0)
        settled[phase] = meter.settled
    for step in range(3):
        for phase in PHASES[5:8]:  # forward, backward, step
            observer(phase, step)
        settled[f"step {step}"] = meter.settled
        observer.touch("evaluate", step + 1)  # a script evaluates between its steps
    board.close()
    assert settled == {"rendezvous": 0, "build": 1, "init": 2, "step 0": 3, "step 1": 4, "step 2": 4}


def test_torch_compile_is_a_phase_in_the_heartbeats() -> None:
    """It may take minutes in one forward, and is no hang."""
    import torch
    from torch._dynamo.callback import callback_handler

    board, beats = Heartbeats.create(1), list[Beat]()
    meter: Any = SimpleNamespace(sample=lambda: None)
    observer = Observer(board, 0, meter)
    observer.watch_compiles()
    observer.touch("forward", 3)

    def backend(graph: Any, inputs: Any) -> Any:
        beats.append(board.read(0))
        return graph.forward

    try:
        torch.compile(lambda tensor: tensor + 1, backend=backend)(torch.ones(2))
    finally:
        callback_handler.clear()
    assert [(beat.phase, beat.step) for beat in beats] == [("compile", 3)]
    assert board.read(0).phase == "forward"
    board.close()
