"""The worst-case exam, with a fake engine that keeps its weight in a file."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from autods.config.deepspeed import GATHER, allow_gathering
from autods.rank.distributed import Ranks
from autods.rank.exam import WorstCaseExam
from autods.rank.memory import Meter
from autods.types import Examined

ALONE = Ranks(rank=0, world_size=1)


class Engine:
    """One weight; a step adds 1 to it and it is also the loss."""

    def __init__(self, *, forgets: bool = False, loses: bool = False, sharded: bool = False, gathers: bool = True):
        self.module = torch.nn.Linear(1, 1, bias=False)
        self.module.weight.data.fill_(3.0)
        self.forgets, self.loses, self.sharded, self.gathers = forgets, loses, sharded, gathers
        self.checkpoint_engine: Any = None
        self.written: list[Path] = []

    def save_checkpoint(self, folder: str, tag: str) -> None:
        Path(folder).mkdir()
        (Path(folder) / tag).write_text(str(self.weight))

    def load_checkpoint(self, folder: str, tag: str) -> tuple[Any, Any]:
        if self.loses:
            return None, None
        if not self.forgets:
            self.module.weight.data.fill_(float((Path(folder) / tag).read_text()))
        return folder, {}

    def save_16bit_model(self, folder: str, name: str) -> bool:
        self.written.append(Path(folder) / name)
        self.written[-1].write_bytes(b"weights")
        return True

    def zero_optimization_partition_weights(self) -> bool:
        return self.sharded

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        return self.gathers

    @property
    def weight(self) -> float:
        return float(self.module.weight.detach())

    def step(self, index: int) -> None:
        self.module.weight.data.add_(1.0)


def exam_of(engine: Engine, folder: Path, **ops: Any) -> WorstCaseExam:
    longest = Examined(batch_shape=(4, 128), draws=16)
    return WorstCaseExam(
        engine=engine, ranks=ALONE, folder=folder / "checkpoint", index=2, examined=longest,
        **{
            "evaluate": lambda: engine.weight, "observe": lambda phase, index: None, "meter": Meter(),
            "held_bytes": [0] * 5, **ops,
        },
    )  # fmt: skip


def pass_exam(engine: Engine, folder: Path, **ops: Any) -> tuple[dict[str, Any], list[tuple[str, int]]]:
    seen: list[tuple[str, int]] = []
    exam = exam_of(engine, folder, observe=lambda phase, index: seen.append((phase, index)), **ops)
    while exam.advance():
        seen.append(("step", exam.index))
        engine.step(exam.index)
    return asdict(exam.examined), seen


def test_one_step_follows_the_save_and_another_the_load(tmp_path: Path) -> None:
    _, seen = pass_exam(Engine(), tmp_path)
    assert seen == [("evaluate", 2), ("save", 2), ("step", 2), ("load", 3), ("evaluate", 3), ("step", 3)]


def test_what_was_saved_is_measured_and_removed(tmp_path: Path) -> None:
    examined, _ = pass_exam(Engine(), tmp_path)
    assert examined["checkpoint_bytes"] == len("3.0")
    assert examined["save_s"] > 0
    assert examined["load_s"] > 0
    assert examined["restored"] is True
    assert list(tmp_path.iterdir()) == []


def test_a_load_that_brings_nothing_back_is_seen(tmp_path: Path) -> None:
    assert pass_exam(Engine(forgets=True), tmp_path)[0]["restored"] is False


@pytest.mark.parametrize(
    ("saved", "loaded", "same"), [(6.9375, 6.96875, True), (6.9375, 7.0, False), (6.94, 6.97, False)]
)
def test_a_bfloat16_loss_may_come_back_one_step_off(tmp_path: Path, saved: float, loaded: float, same: bool) -> None:
    losses = iter([saved, loaded])
    assert pass_exam(Engine(), tmp_path, evaluate=lambda: next(losses))[0]["restored"] is same


def test_a_saved_checkpoint_that_does_not_load_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="found nothing to load"):
        pass_exam(Engine(loses=True), tmp_path)


def test_weights_in_parts_are_gathered(tmp_path: Path) -> None:
    examined, _ = pass_exam(Engine(sharded=True), tmp_path)
    assert examined["gathered"] is True
    assert examined["left_out"] == ()


def test_gathered_weights_are_written_nowhere_by_torch(tmp_path: Path) -> None:
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    engine = Engine(sharded=True)
    engine.checkpoint_engine = TorchCheckpointEngine()
    examined, _ = pass_exam(engine, tmp_path)
    assert examined["gathered"] is True
    assert engine.written == [Path("/dev/null")]


def test_gathering_that_the_config_turns_off_is_reported(tmp_path: Path) -> None:
    examined, _ = pass_exam(Engine(sharded=True, gathers=False), tmp_path)
    assert examined["gathered"] is None
    assert GATHER in examined["left_out"][0]


def test_a_full_disk_skips_the_checkpoint_and_reports_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "0")  # the folder takes the files of all nodes
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    examined, seen = pass_exam(Engine(), tmp_path)
    assert examined["checkpoint_bytes"] is None
    assert "17 B of disk are needed and 10 B are free" in examined["left_out"][0]
    assert seen[-1] == ("step", 2)


class Unfinished(Engine):
    def save_checkpoint(self, folder: str, tag: str) -> None:
        raise NotImplementedError("no states of this kind")


def test_an_unsupported_part_is_left_out_with_deepspeeds_reason(tmp_path: Path) -> None:
    examined, seen = pass_exam(Unfinished(), tmp_path)
    assert examined["save_s"] is None
    assert examined["left_out"] == ("DeepSpeed cannot save a checkpoint here: no states of this kind",)
    assert seen[-1] == ("step", 2)


class Full(Engine):
    def save_checkpoint(self, folder: str, tag: str) -> None:
        raise RuntimeError("can't allocate memory")


def test_any_other_failure_of_a_save_is_the_trials(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        pass_exam(Full(), tmp_path)


def test_a_model_without_a_loss_in_evaluation_is_reported(tmp_path: Path) -> None:
    examined, _ = pass_exam(Engine(), tmp_path, evaluate=lambda: None)
    assert examined["restored"] is None
    assert "no finite loss" in examined["left_out"][0]


def test_the_users_word_on_gathering_is_kept() -> None:
    assert allow_gathering({})["zero_optimization"] == {GATHER: True}
    config = {"zero_optimization": {"stage": 3, GATHER: False}}
    assert allow_gathering(config) == config


class Held(Meter):
    """Holds these MiB, one reading after the other, and the last of them from then on."""

    def __init__(self, *mib: int) -> None:
        self.mib = list(mib)

    def held_bytes(self) -> int:
        return (self.mib.pop(0) if len(self.mib) > 1 else self.mib[0]) * 2**20


GROWING = [step * 32 * 2**20 for step in range(5)]


@pytest.mark.parametrize(
    ("then_mib", "growth"),
    [
        (range(128, 500, 32), 32 * 2**20),
        ((0,), 0),  # garbage in cycles
        ((128, 160, 192, 192), 0),  # an allocator that fills up over the first steps
    ],
)
def test_a_leak_goes_on_in_further_steps(tmp_path: Path, then_mib: Sequence[int], growth: int) -> None:
    examined, _ = pass_exam(Engine(), tmp_path, held_bytes=GROWING, meter=Held(*then_mib))
    assert examined["growth_bytes"] == growth


def test_where_memory_seems_to_grow_six_steps_follow(tmp_path: Path) -> None:
    _, seen = pass_exam(Engine(), tmp_path, held_bytes=GROWING, meter=Held(*range(128, 500, 32)))
    assert seen[:6] == [("step", 2 + i) for i in range(6)]
    assert seen[6:8] == [("evaluate", 8), ("save", 8)]


def test_a_script_that_has_ended_is_judged_by_its_steps(tmp_path: Path) -> None:
    exam = exam_of(Engine(), tmp_path, held_bytes=GROWING, meter=Held(128))
    with patch("torch.distributed.is_initialized", return_value=True):
        exam.finish_without_steps()
    assert exam.examined.growth_bytes == 32 * 2**20


def test_too_few_steps_to_see_a_leak_are_reported(tmp_path: Path) -> None:
    examined, _ = pass_exam(Engine(), tmp_path, held_bytes=[0, 0, 0])
    assert examined["growth_bytes"] is None
    assert examined["left_out"] == ("growth of memory from step to step was not checked: 3 steps are too few",)
