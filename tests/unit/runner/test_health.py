"""What slows the ranks of a job: links, the rate of an all-reduce, a slow rank, a throttled card."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autods.config.catalogue import read_catalogue
from autods.devices import Finding, Health, cpu
from autods.events import Event, Note
from autods.runner.health import Watch, describe_cards, find_slowest, judge_nodes, judge_rate
from autods.runner.node_messages import Heartbeat
from autods.types import SlowRank
from tests.support.walks import SETTINGS

H100, PCIE = read_catalogue()["h100-80gb"], read_catalogue()["rtx4090-24gb"]
GB = 1e9


def test_nvlink_that_is_down_is_found_where_the_machine_has_it() -> None:
    links = Health(links={(0, 1): "NVLink", (0, 2): "PCIe", (1, 2): "PCIe"})
    preflight = judge_nodes([("", links)], H100)
    (finding,) = preflight.findings
    assert finding.text.startswith("cards 0 and 2, 1 and 2 reach each other over PCIe, and NVIDIA H100")
    assert preflight.links == "PCIe between 2 of 3 pairs of cards, NVLink between 1 of 3 pairs of cards"
    assert judge_nodes([("", Health(links={(0, 1): "PCIe"}))], PCIE).findings == ()


def test_cards_that_only_share_host_memory_are_found() -> None:
    (finding,) = judge_nodes([("", Health(links={(0, 1): "host memory"}))], PCIE).findings
    assert "P2P is off" in finding.text


def test_findings_of_several_nodes_name_the_node() -> None:
    broken = Finding(text="card 1 is gone", remedy="reset it", is_fatal=True)
    slow = Finding(text="card 0 is throttled", remedy="cool it")
    preflight = judge_nodes([("10.0.0.1", Health(findings=(slow,))), ("10.0.0.2", Health(findings=(broken,)))], H100)
    assert [finding.text for finding in preflight.findings] == [
        "node 10.0.0.1: card 0 is throttled",
        "node 10.0.0.2: card 1 is gone",
    ]
    assert [finding.is_fatal for finding in preflight.findings] == [False, True]


@pytest.mark.parametrize(
    ("gb_per_s", "ranks_per_node", "nodes", "link"),
    [
        (350, 8, 1, None),
        (160, 8, 1, "NVLink 4"),
        (160, 1, 2, None),
        (150, 8, 2, "EFA"),
        (20, 1, 2, "EFA"),
    ],
)
def test_a_rate_under_half_of_the_usual_is_found(
    gb_per_s: float, ranks_per_node: int, nodes: int, link: str | None
) -> None:
    finding = judge_rate(gb_per_s * GB, H100, ranks_per_node=ranks_per_node, nodes=nodes)
    if link is None:
        assert finding is None
    else:
        assert finding is not None
        assert f"moves {gb_per_s} GB/s" in finding.text
        assert finding.text.endswith(f"over {link}")


def test_a_machine_without_known_links_has_no_usual_rate() -> None:
    assert judge_rate(1.0, replace(H100, links=None), ranks_per_node=8, nodes=1) is None


@pytest.mark.parametrize(
    ("forward_s", "slowest"),
    [
        ({0: 1.0, 1: 1.3}, SlowRank(rank=1, ratio=1.3)),
        ({0: 1.0, 1: 1.1, 2: 2.0, 3: 1.0}, SlowRank(rank=2, ratio=2.0)),
        ({0: 1.0, 1: 1.1}, None),
        ({0: 1.0, 1: 0.0}, None),  # it did too few forwards
        ({0: 1.0}, None),
        ({}, None),
    ],
)
def test_the_slowest_rank_is_one_beyond_noise(forward_s: dict[int, float], slowest: SlowRank | None) -> None:
    assert find_slowest(forward_s) == slowest


def beat(step: int, *forward_s: float, throttled: tuple[str, ...] = ()) -> Heartbeat:
    return Heartbeat(step=step, forward_s={str(rank): each for rank, each in enumerate(forward_s)}, throttled=throttled)


def test_a_run_names_a_slow_rank_once_when_it_stays_slow() -> None:
    warnings: list[str] = []
    watch = Watch(warnings.append, every=8)
    for step in (1, 2, 9, 17):
        watch.hear_heartbeat(beat(step, 1.0, 1.5), of_run=True)
        assert len(warnings) == (step == 17)
    for step in range(18, 60):
        watch.hear_heartbeat(beat(step, 1.0, 1.6), of_run=True)
    (warning,) = warnings
    assert warning.startswith("rank 1 is the slowest: its forward takes 1.50 ×")


def test_a_run_that_goes_on_from_a_checkpoint_is_looked_at_again() -> None:
    warnings: list[str] = []
    watch = Watch(warnings.append)
    watch.hear_heartbeat(beat(1000, 1.0, 1.0), of_run=True)
    for step in (500, 508, 516):
        watch.hear_heartbeat(beat(step, 1.0, 1.5), of_run=True)
    assert len(warnings) == 1


def test_a_rank_that_was_slow_for_a_moment_is_not_named() -> None:
    warnings: list[str] = []
    watch = Watch(warnings.append, every=1)
    for step, (first, second) in enumerate([(1.0, 1.5), (1.0, 1.5), (1.0, 1.0), (1.5, 1.0), (1.0, 1.5)]):
        watch.hear_heartbeat(beat(step, first, second), of_run=True)
    assert warnings == []


def test_a_throttled_card_is_warned_of_in_trials_and_runs() -> None:
    warnings: list[str] = []
    watch = Watch(warnings.append)
    for of_run in (False, True):
        watch.hear_heartbeat(beat(1, throttled=("card 1 is throttled",)), of_run=of_run)
    assert set(warnings) == {"card 1 is throttled"}


@pytest.mark.parametrize(
    ("base", "address", "says"),
    [
        ({"bf16": {"enabled": True}}, None, ["this processor lacks AVX-512, and multiplies bf16"]),
        ({}, None, []),
        ({"bf16": {"enabled": True}}, "10.0.0.1:6379", []),  # that of other nodes is not known
    ],
)
def test_a_slow_precision_is_said_before_ranks_start(
    base: dict[str, object], address: str | None, says: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "read_processor_flags", lambda: frozenset({"sse2", "avx2"}))
    said: list[Event] = []
    describe_cards(replace(SETTINGS, device="cpu", base=base, address=address), said.append)
    notes = [event.text for event in said if isinstance(event, Note)]
    assert [note[: len(text)] for note, text in zip(notes, says, strict=True)] == says
    assert all(
        note.endswith("try --precision fp32, where speed matters more than to stand in for a GPU") for note in notes
    )
