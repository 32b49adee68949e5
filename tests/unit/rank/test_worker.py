"""The heartbeats of a rank, and the workload that it trains."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from autods.rank.job import Beat, Heartbeats
from autods.rank.memory import Meter
from autods.rank.worker import LossyLog, Observer, RankContext, show_library_warnings_once
from autods.report.rank_logs import is_library_warning
from autods.types import PHASES
from autods.workload import Workload
from tests.support.ends import JOB


class LateMeter(Meter):
    """The meter of a device that is `late` marks behind its host; a mark is the seconds at which it is reached."""

    def __init__(self, late: int) -> None:
        self.now, self.late, self.marks = 0.0, late, list[float]()

    def mark(self) -> float:
        self.marks.append(self.now)
        return self.now

    def seconds_between(self, begin: float, end: float) -> float | None:
        return end - begin if end in self.marks[: len(self.marks) - self.late] else None


def step_through(meter: LateMeter, forwards: Sequence[float]) -> Beat:
    """The last heartbeat of a rank whose forwards take so long; its backwards take a second."""
    board = Heartbeats.create(1)
    observer = Observer(board, 0, meter)
    for step, seconds in enumerate(forwards):
        observer.touch("forward", step)
        meter.now += seconds
        observer.touch("backward", step)
        meter.now += 1.0
        observer.touch("step", step)
    last = board.read(0)
    board.close()
    return last


@pytest.mark.parametrize("late", [0, 1, 3])
def test_a_forward_is_timed_once_the_device_has_done_it(late: int) -> None:
    assert step_through(LateMeter(late), [9.0, *[2.0] * 12]).forward_s == 2.0


def test_few_forwards_tell_nothing_of_a_ranks_speed() -> None:
    last = step_through(LateMeter(0), [2.0, 2.0])
    assert (last.forward_s, last.phase, last.step) == (0.0, "step", 1)


def test_an_evaluation_is_no_forward_of_a_step() -> None:
    board, meter = Heartbeats.create(1), LateMeter(0)
    observer = Observer(board, 0, meter)
    for _ in range(6):
        for phase in ("forward", "evaluate", "backward"):
            observer.touch(phase, 0)
            meter.now += 1.0
    assert not observer.clock.seconds
    board.close()


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


def test_the_meter_settles_after_the_first_step_behind_a_checkpoint() -> None:
    """NCCL and the kernels take their memory in the first step of a process, whatever its number is."""
    meter, board = SettlingMeter(), Heartbeats.create(1)
    observer = Observer(board, 0, meter)
    settled = []
    for phase, step in (("init", 0), ("load", 0), ("forward", 500), ("script", 501), ("forward", 501)):
        observer(phase, step)  # type: ignore[arg-type]
        settled.append(meter.settled)
    board.close()
    assert settled == [0, 1, 1, 2, 2]


def test_torch_compile_is_a_phase_in_the_heartbeats() -> None:
    """It may take minutes in one forward, and is no hang."""
    import torch
    from torch._dynamo.callback import callback_handler

    board, beats = Heartbeats.create(1), list[Beat]()
    observer = Observer(board, 0, Meter())
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


def test_a_log_without_room_loses_lines_and_raises_nothing() -> None:
    with io.TextIOWrapper(io.BufferedWriter(LossyLog("/dev/full", "wb")), line_buffering=True) as log:
        print("lost", file=log)
    with pytest.raises(OSError, match="No space left"), open("/dev/full", "w") as file:
        print("lost", file=file, flush=True)


_LIBRARY = "/venv/lib/python3.11/site-packages/torch/nn/layer.py"


def test_a_librarys_warning_is_printed_once_in_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, category, filename, lineno: own.append(filename))
    show_library_warnings_once()
    for file in (_LIBRARY, _LIBRARY, "train.py", "train.py"):
        warnings.showwarning(FutureWarning("old\n name"), FutureWarning, file, 7)
    assert own == ["train.py", "train.py"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"{_LIBRARY}:7: FutureWarning: old name"
    assert is_library_warning(line)
    assert not is_library_warning("/home/me/train.py:7: FutureWarning: mine")
    assert not is_library_warning(f'  File "{_LIBRARY}", line 7, in forward')
