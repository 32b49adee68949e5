"""What is found of cards and processors before ranks start on them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autods.devices import Finding
from autods.devices.cpu import examine_processors, measure_load
from autods.devices.cuda import examine_cards, find_throttling
from tests.support.scripted_nvml import GIB, FakeCard, FakeNvml, NVMLError, four

CORES = len(os.sched_getaffinity(0))


def find(card: FakeCard) -> Finding:
    """The only finding of a node with a healthy card and this one."""
    (finding,) = examine_cards(None, 2, FakeNvml([FakeCard(), card])).findings
    return finding


def test_healthy_cards_have_no_findings() -> None:
    health = examine_cards(None, 4, four())
    assert health.findings == ()
    assert set(health.links.values()) == {"NVLink"}
    assert sorted(health.links) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]


@pytest.mark.parametrize(
    ("card", "text"),
    [
        (FakeCard(uncorrected=3), "3 errors of its memory could not be corrected"),
        (FakeCard(reasons=0x40 | 0x08), "is throttled: too hot, by hardware"),
        (FakeCard(reasons=0x80 | 0x08), "is throttled: power brake"),
        (FakeCard(reasons=0x08), "is throttled: hardware slowdown"),
        (FakeCard(watts=(300, 700)), "its power is limited to 300 of 700 W"),
        (FakeCard(lanes=(4, 16)), "its PCIe link has 4 of 16 lanes"),
        (FakeCard(busy=97), "something else keeps it busy, 97 % of the time"),
        (FakeCard(used_bytes=3 * GIB, pids=(7,)), "other processes (pid 7) hold 3.0 GiB"),
    ],
)
def test_what_slows_a_card_is_a_warning(card: FakeCard, text: str) -> None:
    finding = find(card)
    assert finding.text.startswith("card 1 (A Card)")
    assert text in finding.text
    assert finding.remedy
    assert not finding.is_fatal


@pytest.mark.parametrize(
    ("card", "text"),
    [
        (FakeCard(remapped=(0, 1, 1, 0)), "broken memory is replaced at the next reset"),
        (FakeCard(retires=1), "broken memory is replaced at the next reset"),
        (FakeCard(remapped=(0, 9, 0, 1)), "could not be replaced"),
        (FakeCard(lost=True), "a card is gone: GPU is lost"),
    ],
)
def test_a_broken_card_makes_training_senseless(card: FakeCard, text: str) -> None:
    finding = find(card)
    assert text in finding.text
    assert finding.is_fatal


def test_a_missing_card_makes_training_senseless() -> None:
    (finding,) = examine_cards("0,1", 4, four()).findings
    assert finding.text == "4 ranks need a card each, and 2 are there"
    assert finding.is_fatal


def test_reaching_the_power_limit_or_idling_is_no_throttling() -> None:
    nvml = FakeNvml([FakeCard(reasons=reasons) for reasons in (0x0, 0x1, 0x4)])
    assert [find_throttling(nvml, card) for card in nvml.cards] == [None] * 3


def test_a_card_whose_driver_was_just_loaded_is_not_busy() -> None:
    assert examine_cards("0", 1, FakeNvml([FakeCard(busy=99, persistent=0)])).findings == ()
    used = FakeCard(busy=99, persistent=0, used_bytes=3 * GIB)  # somebody else's process had loaded it
    assert "keeps it busy" in examine_cards("0", 1, FakeNvml([used])).findings[0].text


def test_drivers_before_535_tell_why_a_card_is_throttled() -> None:
    nvml = FakeNvml([FakeCard(reasons=0x20)], old_names=True)
    assert "too hot" in str(find_throttling(nvml, nvml.cards[0]))


def test_a_link_whose_width_is_not_told_is_no_finding() -> None:
    assert examine_cards(None, 1, FakeNvml([FakeCard(lanes=(0, 16))])).findings == ()


def test_what_a_driver_does_not_tell_is_no_finding() -> None:
    silent = FakeCard(knows_health=False, remapped=(0, 9, 1, 1), lanes=(4, 16), busy=99, reasons=0x40)
    health = examine_cards(None, 2, FakeNvml([silent, FakeCard(knows_health=False)]))
    assert (health.findings, set(health.links.values())) == ((), {"PCIe"})
    assert examine_cards(None, 2, FakeNvml(problem=NVMLError("Driver Not Loaded", 9))).findings == ()


@pytest.mark.parametrize("kind", ["PCIe", "host memory"])
def test_cards_without_nvlink_say_how_they_reach_each_other(kind: str) -> None:
    health = examine_cards("0,1", 2, FakeNvml([FakeCard(), FakeCard(uuid="GPU-b")], links=kind))
    assert health.links == {(0, 1): kind}


def make_processors(folder: Path, *, throttled: int = 0, allowed: int = 4_000_000) -> Path:
    """/sys/devices/system/cpu with one processor of 4 GHz."""
    files = {"thermal_throttle/core_throttle_count": throttled, "cpufreq/scaling_max_freq": allowed}
    for name, value in {**files, "cpufreq/cpuinfo_max_freq": 4_000_000}.items():
        (path := folder / "cpu0" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return folder


def test_idle_processors_have_no_findings(tmp_path: Path) -> None:
    for processors in (tmp_path, make_processors(tmp_path, throttled=7)):  # without such files, and with them
        assert not list(examine_processors(1, measure_load=lambda: 0.1, processors=processors))


def test_load_on_processors_of_other_jobs_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2})
    assert measure_load(lambda: [10.0, 100.0, 30.0, 100.0]) == pytest.approx(0.2)
    assert measure_load(lambda: [0.0, 100.0, 0.0]) == 0


def test_a_processor_that_is_off_tells_no_clock(tmp_path: Path) -> None:
    make_processors(tmp_path)
    (tmp_path / "cpu1/cpufreq/scaling_max_freq").mkdir(parents=True)  # as unreadable as one that answers "busy"
    assert not list(examine_processors(1, measure_load=lambda: 0.1, processors=tmp_path))


def test_load_slow_clocks_and_too_many_ranks_are_found(tmp_path: Path) -> None:
    def measure_load() -> float:
        make_processors(tmp_path, throttled=8, allowed=2_000_000)  # it became too hot meanwhile
        return 0.6

    make_processors(tmp_path, throttled=7, allowed=2_000_000)
    findings = list(examine_processors(CORES + 1, measure_load=measure_load, processors=tmp_path))
    ranks, load, heat, clock = (finding.text for finding in findings)
    assert ranks == f"there are processors for {CORES} of {CORES + 1} ranks, so they wait for each other"
    assert load == "other processes keep over 25% of this machine's processors busy, so times say little"
    assert heat == "processors are too hot and run slower"
    assert clock == "processors may run at 50% of their highest clock"
    assert not any(finding.is_fatal for finding in findings)
