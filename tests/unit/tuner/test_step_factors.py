"""What trials show of a machine's speed is kept for its later fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autods.config.catalogue import read_catalogue
from autods.forecast.predict.calibration import StepFactors
from autods.tuner.trial_forecasts import FACTORS, keep_factors, name_site, open_factors
from tests.support.composed import make_site

A100 = read_catalogue()["a100-80gb"]
MACHINE = name_site(make_site(8, machine=A100))
SLOW = StepFactors(compute=1.25, link=1.5)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTODS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def open_in(folder: Path) -> tuple[StepFactors, list[str]]:
    told: list[str] = []
    return open_factors(MACHINE, folder, told.append), told


def test_a_later_fit_begins_with_what_the_last_one_learned(tmp_path: Path) -> None:
    assert open_in(tmp_path / "first") == (StepFactors(), [])
    keep_factors(MACHINE, SLOW)
    assert open_in(tmp_path / "second") == (SLOW, [])


def test_a_resumed_fit_begins_as_its_first_run_did(tmp_path: Path) -> None:
    open_in(tmp_path)
    keep_factors(MACHINE, SLOW)
    assert open_in(tmp_path) == (StepFactors(), [])


assert A100.links is not None
PCIE = replace(A100, links=replace(A100.links, between_gpus="PCIe 4.0 x16"))


@pytest.mark.parametrize(
    "other",
    [
        name_site(make_site(4, machine=A100)),
        name_site(make_site(16, machine=A100, ranks_per_node=8)),
        name_site(make_site(8, machine=PCIE)),
        name_site(make_site(8, machine=replace(A100, title="NVIDIA H100 80GB HBM3"))),
    ],
)
def test_other_cards_links_or_nodes_have_other_factors(tmp_path: Path, other: str) -> None:
    keep_factors(other, SLOW)
    assert open_in(tmp_path)[0] == StepFactors()


def test_a_single_card_has_no_link_in_its_name() -> None:
    assert name_site(make_site(1, machine=A100)) == name_site(make_site(1, machine=PCIE))


@pytest.mark.parametrize("content", ["", "[1]", '{"compute": 1}x', '{"compute": 0, "link": 1}', '{"colour": 2}'])
def test_a_broken_file_is_named_and_not_used(tmp_path: Path, content: str) -> None:
    (tmp_path / FACTORS).write_text(content)
    factors, told = open_in(tmp_path)
    assert factors == StepFactors()
    assert [text.partition(" is not used")[0] for text in told] == [str(tmp_path / FACTORS)]


def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path: Path, cache: Path) -> None:
    cache.write_text("a file in the folder's place")
    keep_factors(MACHINE, SLOW)
    assert open_in(tmp_path)[0] == StepFactors()
