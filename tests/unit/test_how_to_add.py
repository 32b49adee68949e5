"""What CONTRIBUTING.md says of a further rung and a further machine: each is a file, and a new need is one row.

A made-up trainer is in `rank/script/test_adapters.py`, a device in `devices/test_third_device.py`, a column of the
answer in `report/test_document.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autods.config.catalogue import Site
from autods.config.rungs import NEEDS, PLACEHOLDERS, RungNeed
from autods.forecast.testing import simulate_peaks
from autods.forecast.values import EngineSpec, Simulation
from autods.tuner.candidates import list_candidates
from autods.types import ModelFacts
from tests.support.machines import SOURCE, a_machine
from tests.support.planned import FACTS, GIB, Planned, question
from tests.support.settings import fit_settings

RUNG = """
name = "zero3-switch"
order = 45
title = "Parameters split over the ranks behind a switch"
stage = 3
shards = ["optimizer", "gradients", "parameters"]

[places]
parameters = "device"
gradients = "device"
optimizer = "device"

[needs]
world_size = 2
nvme_path = false
switch_ranks = 4

[ds_config.zero_optimization]
stage = 3
zero_hpz_partition_size = "{ranks_per_node}"
"""
MACHINE = """
name = "made-up-40gb"
title = "Made-up 40 GB"
source = "memory: its maker; node: its maker"

[device]
bytes = 42_949_672_960

[node]
gpus = 8
host_bytes = 549_755_813_888
"""
UNMET = "2 ranks behind a switch: it needs 4"


def lack_switch(least: int, site: Site, facts: ModelFacts | None) -> str | None:
    ranks = site.ranks_per_node
    return None if ranks >= least else f"{ranks} ranks behind a switch: it needs {least}"


@pytest.fixture
def strategies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str]:
    """The folder of a rung with a need and a placeholder that no shipped rung has."""
    monkeypatch.setitem(NEEDS, "switch_ranks", RungNeed(value=int, find_lack=lack_switch))
    monkeypatch.setitem(PLACEHOLDERS, "{ranks_per_node}", lambda site: site.ranks_per_node)
    (tmp_path / "zero3-switch.toml").write_text(RUNG)
    return (str(tmp_path),)


def simulate(spec: EngineSpec, micro_batch: int) -> Simulation:
    return simulate_peaks(micro_batch, init=GIB, backward=(60 if spec.rung == "ddp" else 20) * GIB)


@pytest.mark.parametrize(("gpus", "skip"), [(8, None), (2, UNMET)])
def test_a_fit_has_a_further_rung_or_its_unmet_need(strategies: tuple[str], gpus: int, skip: str | None) -> None:
    settings = fit_settings(SOURCE, hardware=a_machine(gpus), strategies=strategies)
    rungs = {candidate.rung.name: candidate.skip for candidate in list_candidates(settings, FACTS, {})}
    assert list(rungs).index("zero3-switch") == list(rungs).index("zero3") - 1
    assert (rungs["zero3-switch"], rungs["zero3"]) == (skip, None)


def test_a_plan_has_a_further_rung_with_its_placeholder(strategies: tuple[str]) -> None:
    planned = Planned(question(strategies=strategies, largest=False), simulate)
    assert planned.verdicts()["zero3-switch"] == "fits"
    (config,) = (spec.ds_config for spec in planned.simulator.engines if spec.rung == "zero3-switch")
    assert config["zero_optimization"]["zero_hpz_partition_size"] == 8


def test_a_plan_says_which_need_of_a_rung_is_unmet(strategies: tuple[str]) -> None:
    planned = Planned(question(strategies=strategies, largest=False, gpus=2), simulate)
    reasons: dict[str, Any] = {rung.rung: (rung.verdict, rung.reason) for rung in planned.forecast.sites[0].rungs}
    assert reasons["zero3-switch"] == ("not_applicable", UNMET)


def test_a_further_machine_is_a_file_that_plan_on_takes(tmp_path: Path) -> None:
    (path := tmp_path / "made-up-40gb.toml").write_text(MACHINE)
    planned = Planned(question(on=str(path), largest=False), simulate)
    (site,) = planned.forecast.sites
    assert (site.site.machine.title, site.site.world_size) == ("Made-up 40 GB", 8)
    assert (planned.verdicts()["ddp"], planned.verdicts()["zero1"]) == ("cannot_fit", "fits")
