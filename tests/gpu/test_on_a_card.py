"""What must hold on a real card, whichever it is: `python -m pytest tests/gpu` on a CUDA machine, some two minutes.

The figures come from `python tests/gpu/measure.py`; here it is only asked whether they mean what they say. Skipped with
the reason where NVML shows no card.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import measure
from gpu_cells import Cell, Site, config_of, source
from gpu_ranks import Ranks

from autods.devices.cuda import read_used_bytes
from autods.system.host import read_hardware
from autods.types import Fit, OutOfMemory, Steps

GIB = 2**30
STEPS = Steps(warmup=1, timed=2)


class Bench:
    """Ranks on one card with the small model, and trials of it."""

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        total = read_hardware().cards[0].usable_bytes
        self.site = Site(device="cuda", ranks=1, usable_bytes=total, precision="bf16", rungs=("ddp",))
        self.ranks = Ranks(source("gpt2-small", folder), "cuda", 1, folder, said=self.said.append)

    def trial(self, rung: str = "ddp", limit: int | None = None, micro_batch: int = 1):
        cell = Cell(
            model="gpt2-small", precision="bf16", rung=rung, world_size=1, card_bytes=limit, micro_batch=micro_batch
        )
        config = config_of(cell, self.ranks.facts, self.site)
        return self.ranks.run(
            ds_config=config, micro_batch=micro_batch, checkpointing=True, steps=STEPS, limit_bytes=limit, wall_s=120.0
        )


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("gpu"))
    with made.ranks:
        made.ranks.survey()
        yield made


@pytest.mark.gpu
def test_ranks_are_forked_from_a_zygote_without_cuda(bench: Bench) -> None:
    outcome, _, _ = bench.trial()
    assert isinstance(outcome, Fit)
    assert not [said for said in bench.said if "new processes" in said]


@pytest.mark.gpu
def test_a_card_holds_the_tensors_the_cache_and_what_lies_beside(bench: Bench) -> None:
    outcome, peaks, _ = bench.trial()
    assert isinstance(outcome, Fit)
    assert 0 < peaks["device_allocated"] < peaks["device_in_use"] <= peaks["device"]
    assert 100 * 2**20 < peaks["device_beside"] < 4 * GIB


@pytest.mark.gpu
def test_an_emulated_card_runs_out_only_where_it_is_too_small(bench: Bench) -> None:
    _, peaks, _ = bench.trial()
    small, _, _ = bench.trial(limit=int(peaks["device_allocated"] * 0.7))
    assert isinstance(small, OutOfMemory)
    assert small.tier == "device"
    large, held, _ = bench.trial(limit=int(peaks["device"] * 1.1))
    assert isinstance(large, Fit)
    assert held["device"] <= int(peaks["device"] * 1.1)


@pytest.mark.gpu
def test_the_card_comes_back_to_what_it_held_after_each_trial(bench: Bench) -> None:
    before = read_used_bytes(None)
    bench.trial()
    bench.trial(limit=GIB // 2)
    after = read_used_bytes(None)
    assert before is not None
    assert after is not None
    assert abs(after[0] - before[0]) < 64 * 2**20
    assert not [said for said in bench.said if "still holds" in said]


@pytest.mark.gpu
def test_the_measurement_writes_its_file(tmp_path: Path) -> None:
    out = tmp_path / "card.json"
    assert measure.main(["context", "tiny", "forecast", "--gpus", "1", "--rungs", "ddp", "--cards", "1", "--no-build",
                         "--out", str(out), "--seconds", "200"]) == 0  # fmt: skip
    said = measure.results.read(out)
    assert said["device"]["kind"] == "cuda"
    assert said["summary"]["all"]["cells"] >= 2
    assert said["summary"]["all"]["false_cannot_fit"] == 0
