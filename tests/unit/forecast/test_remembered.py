from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from autods.forecast.remembered import SAID, Remembered, remembered
from autods.forecast.scripted import Scripted, allocates
from autods.forecast.simulator import gpu_library
from autods.forecast.values import Ask, Simulated, Trace
from autods.types import ModelFacts, WorkloadSource

SOURCE = WorkloadSource(kind="hf_config", path="/llama/config.json", name="llama", digest="abc", task="causal-lm")
FACTS = ModelFacts(
    parameters=10**9, largest_parameter=10**7, checkpointing=True, tokens_per_sample=1024, has_optimizer=False, layers=4
)
ASK = Ask(rung="zero1", ds_config={"a": 1}, world_size=8, ranks_per_node=8, device_bytes=2**30)


def traced(ask: Ask, micro_batch: int) -> Simulated:
    trace = Trace(
        events=array("q", [512, 1024, -1]), marks=((0, "init"), (2, "forward")), unrounded=frozenset({1}),
        emptied=(2,), copied=((1, 5),),
    )  # fmt: skip
    return replace(allocates(micro_batch, init=1024), traces={"device": trace}, assumed=("a",), seconds=3.0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTODS_CACHE", str(tmp_path))
    return tmp_path / "forecasts"


def test_the_same_question_is_not_simulated_again() -> None:
    first, again = Scripted(FACTS, traced), Scripted(FACTS, traced)
    (before,) = Remembered(first, SOURCE).simulate(ASK, [2])
    (after,) = Remembered(again, SOURCE).simulate(ASK, [2])
    assert len(first.measured) == 1
    assert not again.engines
    assert after == replace(before, assumed=(*before.assumed, SAID), seconds=0.0)


@pytest.mark.parametrize(
    ("source", "ask", "micro_batch"),
    [
        (replace(SOURCE, digest="abd"), ASK, 2),
        (SOURCE, replace(ASK, ds_config={"a": 2}), 2),
        (SOURCE, replace(ASK, device_bytes=2**31), 2),
        (SOURCE, replace(ASK, layers=2), 2),
        (SOURCE, ASK, 3),
    ],
)
def test_another_question_is_simulated(source: WorkloadSource, ask: Ask, micro_batch: int) -> None:
    Remembered(Scripted(FACTS, traced), SOURCE).simulate(ASK, [2])
    again = Scripted(FACTS, traced)
    Remembered(again, source).simulate(ask, [micro_batch])
    assert again.measured


@pytest.mark.parametrize("damage", [b"", b"no zlib", b"x\x9c\xab\xae\x05\x00\x01u\x00\xf9"])
def test_a_damaged_entry_is_as_if_it_were_not_there(cache: Path, damage: bytes) -> None:
    Remembered(Scripted(FACTS, traced), SOURCE).simulate(ASK, [2])
    for path in cache.iterdir():
        path.write_bytes(damage)
    again = Scripted(FACTS, traced)
    (found,) = Remembered(again, SOURCE).simulate(ASK, [2])
    assert again.measured
    assert found == traced(ASK, 2)


def test_facts_are_kept_while_there_is_a_simulated_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Remembered(Scripted(FACTS, traced), SOURCE).facts()
    other = Scripted(replace(FACTS, layers=5), traced)
    assert Remembered(other, SOURCE).facts().layers == 5
    monkeypatch.setattr(gpu_library, "library_path", lambda: tmp_path)
    assert Remembered(Scripted(FACTS, traced), SOURCE).facts().layers == 5


def test_a_cache_that_cannot_be_written_harms_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTODS_CACHE", str(tmp_path / "file"))
    assert Remembered(Scripted(FACTS, traced), SOURCE).simulate(ASK, [2])


def test_a_model_py_and_who_turned_it_off_are_always_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTODS_FORECAST_CACHE", raising=False)
    plain = Scripted(FACTS, traced)
    assert remembered(plain, replace(SOURCE, kind="file")) is plain
    assert remembered(plain, SOURCE) is not plain
    monkeypatch.setenv("AUTODS_FORECAST_CACHE", "off")
    assert remembered(plain, SOURCE) is plain
