"""The heartbeats of a rank, and the workload that it trains."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autods.rank.job import Beat, Heartbeats
from autods.rank.memory import Meter
from autods.rank.worker import Observer, RankContext
from autods.types import PHASES
from autods.workload import Workload
from tests.support.ends import JOB


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


@pytest.mark.parametrize(
    ("job", "stage", "exam", "in_parts"),
    [("train", 3, None, True), ("run", 3, None, True), ("train", 3, "parity", True), ("run", 2, None, False)],
)
def test_zero_init_builds_stage_3_in_parts(
    monkeypatch: pytest.MonkeyPatch, job: Any, stage: int, exam: Any, in_parts: bool
) -> None:
    whole, parts = (Workload(build_model=lambda: None, build_batch=lambda micro_batch_size: ()) for _ in range(2))  # type: ignore[arg-type,return-value]
    monkeypatch.setattr("autods.rank.worker.partition_at_build", lambda workload, config: parts)
    source, config = replace(JOB.source, zero_init=True), {"zero_optimization": {"stage": stage}}
    rank_job = replace(JOB, job=job, exam=exam, source=source, ds_config=config)
    observer: Any = None
    context = RankContext(job=rank_job, slot=0, observer=observer, store=None, workload=whole)
    assert context.load_for_training() is (parts if in_parts else whole)
