"""Where ranks are placed on a cluster, as a scripted Ray answers: need, order, wait, and what can never be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from autods.errors import EnvironmentBroken
from autods.runner import placement
from autods.runner.placement import Need, NodeState, reserve

CPUS = Need(nodes=2, cpus=2, gpus=0)


def a_node(number: int, *, cpus: float = 8, gpus: float = 0, free: float | None = None) -> NodeState:
    total = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    kind = "GPU" if gpus else "CPU"
    return NodeState(
        id=f"id{number}",
        address=f"10.0.0.{number}",
        total=total,
        free={**total, kind: total[kind] if free is None else free},
    )


class Scripted:
    """A cluster whose group is ready at the look of that number, on the nodes that are named."""

    def __init__(self, nodes: Sequence[NodeState], on: Sequence[str] = (), ready_at: int = 0) -> None:
        self.alive, self.on, self.ready_at = list(nodes), list(on), ready_at
        self.looks, self.asked, self.freed = 0, [], 0

    def nodes(self) -> Sequence[NodeState]:
        return self.alive

    def reserve(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        self.asked.append((bundles, strategy))
        return "group"

    def is_ready(self, group: Any, within_s: float) -> bool:
        self.looks += 1
        return self.looks > self.ready_at

    def node_ids(self, group: Any) -> list[str]:
        return self.on

    def free(self, group: Any) -> None:
        self.freed += 1


def silence(text: str) -> None:
    raise AssertionError(f"nothing is worth a word: {text}")


def test_ranks_of_a_node_are_one_bundle_and_bundles_lie_on_different_nodes() -> None:
    cluster = Scripted([a_node(1, gpus=4), a_node(2, gpus=4)], on=["id1", "id2"])
    reserve(cluster, Need(nodes=2, cpus=1, gpus=4), say=silence)
    assert cluster.asked == [([{"CPU": 1.0, "GPU": 4.0}] * 2, "STRICT_SPREAD")]


def test_one_node_is_one_bundle_and_cpu_ranks_ask_for_no_gpu() -> None:
    cluster = Scripted([a_node(1)], on=["id1"])
    reserve(cluster, Need(nodes=1, cpus=2, gpus=0), say=silence)
    assert cluster.asked == [([{"CPU": 2.0}], "STRICT_PACK")]


def test_the_drivers_node_comes_first_and_the_others_by_their_address() -> None:
    nodes = [a_node(number) for number in (10, 9, 2)]
    _, spots = reserve(
        Scripted(nodes, on=["id10", "id9", "id2"]), Need(nodes=3, cpus=1, gpus=0), say=silence, first="id9"
    )
    assert [(spot.node.address, spot.bundle) for spot in spots] == [("10.0.0.9", 1), ("10.0.0.2", 2), ("10.0.0.10", 0)]


def test_who_waits_for_others_to_finish_is_told_what_is_free_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_SILENT_S", 0.0)
    said: list[str] = []
    cluster = Scripted([a_node(1, cpus=2, free=0), a_node(2, cpus=4)], on=["id1", "id2"], ready_at=3)
    reserve(cluster, CPUS, say=said.append)
    assert said == [
        "waiting for 2 CPUs on each of 2 nodes of the Ray cluster: 0 of 2 on 10.0.0.1, 4 of 4 on 10.0.0.2 free"
    ]


def test_a_short_wait_is_not_worth_a_word() -> None:
    cluster = Scripted([a_node(1), a_node(2)], on=["id1", "id2"], ready_at=2)
    reserve(cluster, CPUS, say=silence)


@pytest.mark.parametrize(
    ("nodes", "need", "words"),
    [
        ([a_node(1, cpus=2)], CPUS, ("2 CPUs on each of 2 nodes", "has 1 node (CPUs: 10.0.0.1 2)", "add nodes")),
        ([a_node(1, cpus=8)], CPUS, ("--nodes 1 --gpus 4 would find room",)),
        (
            [a_node(1, gpus=4), a_node(2, gpus=2)],
            Need(nodes=2, cpus=1, gpus=4),
            ("4 GPUs on each of 2 nodes", "10.0.0.1 4, 10.0.0.2 2", "fewer ranks"),
        ),
        ([a_node(1), a_node(2)], Need(nodes=1, cpus=1, gpus=1), ("1 GPU on one node", "GPUs: 10.0.0.1 0, 10.0.0.2 0")),
    ],
)
def test_what_the_cluster_never_can_hold_is_said_at_once_in_two_lines(
    nodes: list[NodeState], need: Need, words: tuple[str, ...]
) -> None:
    cluster = Scripted(nodes)
    with pytest.raises(EnvironmentBroken) as broken:
        reserve(cluster, need, say=silence)
    assert all(word in str(broken.value) for word in words)
    assert len(str(broken.value).splitlines()) == 2
    assert cluster.asked == []


def test_a_node_that_goes_while_one_waits_ends_the_wait_and_gives_back_what_was_asked() -> None:
    cluster = Scripted([a_node(1), a_node(2)], ready_at=9)

    def look(group: Any, within_s: float) -> bool:
        cluster.alive.pop()
        return False

    cluster.is_ready = look  # type: ignore[method-assign]
    with pytest.raises(EnvironmentBroken, match="has 1 node"):
        reserve(cluster, CPUS, say=silence)
    assert cluster.freed == 1
