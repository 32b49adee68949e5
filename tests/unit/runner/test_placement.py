"""Where ranks are placed on a cluster, as a scripted Ray answers, and which nodes go together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autods.devices import CPU, CUDA
from autods.errors import EnvironmentBroken, InputError
from autods.runner import placement
from autods.runner.placement import (
    Need,
    NodeState,
    check_same_software,
    count_ranks,
    describe_gpu_differences,
    reserve_nodes,
    see_all_cards,
    weakest,
)
from tests.support.machines import a_machine, describe, settings_of


def a_need(nodes: int, *, cpus: int = 1, gpus: int = 0) -> Need:
    bundle = {"CPU": float(cpus), **({"GPU": float(gpus)} if gpus else {})}
    return Need(nodes=nodes, resource="GPU" if gpus else "CPU", bundle=bundle)


CPUS = a_need(2, cpus=2)


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
    raise AssertionError(f"reported: {text}")


def test_the_bundles_of_two_nodes_lie_on_different_nodes() -> None:
    cluster = Scripted([a_node(1, gpus=4), a_node(2, gpus=4)], on=["id1", "id2"])
    reserve_nodes(cluster, a_need(2, gpus=4), report=silence)
    assert cluster.asked == [([{"CPU": 1.0, "GPU": 4.0}] * 2, "STRICT_SPREAD")]


def test_cpu_ranks_of_one_node_reserve_no_gpu() -> None:
    cluster = Scripted([a_node(1)], on=["id1"])
    reserve_nodes(cluster, a_need(1, cpus=2), report=silence)
    assert cluster.asked == [([{"CPU": 2.0}], "STRICT_PACK")]


def test_the_drivers_node_comes_first_then_the_addresses() -> None:
    nodes = [a_node(number) for number in (10, 9, 2)]
    _, places = reserve_nodes(
        Scripted(nodes, on=["id10", "id9", "id2"]), a_need(3, cpus=1), report=silence, first="id9"
    )
    in_order = [(node.address, bundle) for bundle, node in places.items()]
    assert in_order == [("10.0.0.9", 1), ("10.0.0.2", 2), ("10.0.0.10", 0)]


@pytest.mark.parametrize(
    "addresses", [["10.0.0.9", "10.0.0.10"], ["fd00::9", "fd00::10"], ["10.0.0.10", "fd00::1", "node1", "node2"]]
)
def test_nodes_are_in_the_order_of_their_addresses(addresses: list[str]) -> None:
    nodes = [replace(a_node(number), address=address) for number, address in enumerate(addresses)]
    on = [node.id for node in reversed(nodes)]
    _, places = reserve_nodes(Scripted(nodes, on=on), a_need(len(nodes), cpus=1), report=silence)
    assert [node.address for node in places.values()] == addresses


def test_a_long_wait_is_reported_with_what_is_free_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_SILENT_S", 0.0)
    said: list[str] = []
    cluster = Scripted([a_node(1, cpus=2, free=0), a_node(2, cpus=4)], on=["id1", "id2"], ready_at=3)
    reserve_nodes(cluster, CPUS, report=said.append)
    assert said == [
        "waiting for 2 CPUs on each of 2 nodes of the Ray cluster: 0 of 2 on 10.0.0.1, 4 of 4 on 10.0.0.2 free"
    ]


def test_a_short_wait_is_not_reported() -> None:
    cluster = Scripted([a_node(1), a_node(2)], on=["id1", "id2"], ready_at=2)
    reserve_nodes(cluster, CPUS, report=silence)


@pytest.mark.parametrize(
    ("nodes", "need", "words"),
    [
        ([a_node(1, cpus=2)], CPUS, ("2 CPUs on each of 2 nodes", "has 1 node (CPUs: 10.0.0.1 2)", "add nodes")),
        ([a_node(1, cpus=8)], CPUS, ("--nodes 1 --gpus 4 would find room",)),
        (
            [a_node(1, gpus=4), a_node(2, gpus=2)],
            a_need(2, gpus=4),
            ("4 GPUs on each of 2 nodes", "10.0.0.1 4, 10.0.0.2 2", "fewer ranks"),
        ),
        ([a_node(1), a_node(2)], a_need(1, gpus=1), ("1 GPU on one node", "GPUs: 10.0.0.1 0, 10.0.0.2 0")),
    ],
)
def test_an_impossible_need_fails_at_once_in_two_lines(
    nodes: list[NodeState], need: Need, words: tuple[str, ...]
) -> None:
    cluster = Scripted(nodes)
    with pytest.raises(EnvironmentBroken) as broken:
        reserve_nodes(cluster, need, report=silence)
    assert all(word in str(broken.value) for word in words)
    assert len(str(broken.value).splitlines()) == 2
    assert cluster.asked == []


class JoinedRay:
    """The part of Ray that counting uses. Each item of `cpus` is a node's number of CPUs; a negative one is dead."""

    def __init__(self, *cpus: int) -> None:
        self.cpus = cpus

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address="10.0.0.1:6379")

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": str(n), "NodeManagerAddress": f"10.0.0.{n}", "Resources": {"CPU": abs(cpus)}, "Alive": cpus > 0}
            for n, cpus in enumerate(self.cpus)
        ]


@pytest.mark.parametrize(
    ("cpus", "problem", "ranks"),
    [((2, 2), None, 4), ((2, -2), None, 2), ((2, 1), None, 2), ((-2, 1), None, 0), ((2, 2), "refused", None)],
)
def test_room_is_that_of_whole_living_nodes(
    monkeypatch: pytest.MonkeyPatch, cpus: tuple[int, ...], problem: str | None, ranks: int | None
) -> None:
    @contextlib.contextmanager
    def joined(**options: Any) -> Iterator[JoinedRay]:
        yield JoinedRay(*cpus)

    monkeypatch.setattr(placement, "session", joined)
    monkeypatch.setattr(placement, "ray_internal", lambda module, name: dict)
    monkeypatch.setattr(placement, "find_head_problem", lambda head: problem)
    assert count_ranks(settings_of(device="cpu", gpus=4, nodes=2, address="10.0.0.1:6379")) == ranks


def test_room_is_not_known_without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: Any) -> Any:
        raise InputError("no Ray cluster answers")

    monkeypatch.setattr(placement, "session", refuse)
    assert count_ranks(settings_of(device="cpu", gpus=4, nodes=2, address="10.0.0.1:6379")) is None


@pytest.mark.parametrize(("device", "cards", "ranks"), [("cuda", 3, 3), ("cuda", 0, None), ("cpu", 3, None)])
def test_room_of_this_machine_is_its_cards(
    monkeypatch: pytest.MonkeyPatch, device: str, cards: int, ranks: int | None
) -> None:
    monkeypatch.setattr(placement, "read_hardware", lambda: a_machine(cards))
    assert count_ranks(replace(settings_of(gpus=4), device=device, address=None)) == ranks


def test_a_node_that_goes_ends_the_wait_and_frees_the_group() -> None:
    cluster = Scripted([a_node(1), a_node(2)], ready_at=9)

    def look(group: Any, within_s: float) -> bool:
        cluster.alive.pop()
        return False

    cluster.is_ready = look  # type: ignore[method-assign]
    with pytest.raises(EnvironmentBroken, match="has 1 node"):
        reserve_nodes(cluster, CPUS, report=silence)
    assert cluster.freed == 1


def test_a_reserved_node_that_dies_is_waited_for_again() -> None:
    cluster = Scripted([a_node(1), a_node(3)], on=["id1", "id2"])

    def look(group: Any, within_s: float) -> bool:
        cluster.looks += 1
        if cluster.looks == 2:
            cluster.on = ["id1", "id3"]
        return True

    cluster.is_ready = look  # type: ignore[method-assign]
    _, nodes = reserve_nodes(cluster, CPUS, report=silence)
    assert [node.id for node in nodes.values()] == ["id1", "id3"]
    assert (cluster.looks, cluster.freed) == (2, 0)


@pytest.mark.parametrize(
    ("options", "cpus", "gpus"),
    [
        ({}, 1, 4),
        ({"device": "cpu", "gpu_memory": "1GiB"}, 4, 0),
        ({"device": "cpu", "gpu_memory": "1GiB", "nodes": None, "address": None}, 1, 0),
    ],
    ids=["GPUs", "CPU ranks on a cluster", "CPU ranks alone"],
)
def test_cpu_ranks_need_a_cpu_each_on_a_shared_cluster(options: dict[str, Any], cpus: int, gpus: int) -> None:
    need = Need.of_settings(settings_of(**options))
    assert (need.bundle["CPU"], need.bundle.get("GPU", 0)) == (cpus, gpus)


def test_software_that_no_rank_uses_may_differ() -> None:
    check_same_software([describe(a_machine()), describe(a_machine(), 2, optuna="5.1")])


def test_different_gpus_are_described_with_their_nodes() -> None:
    text = describe_gpu_differences([describe(a_machine()), describe(a_machine(gib=40), 2)])
    assert text is not None
    assert "4 × A100 with 80.0 GiB on 10.0.0.1" in text
    assert "4 × A100 with 40.0 GiB on 10.0.0.2" in text
    assert describe_gpu_differences([describe(a_machine()), describe(a_machine(), 2)]) is None


def test_the_weakest_node_that_can_hold_the_ranks_decides() -> None:
    hardware = [
        replace(node, driver="580") for node in (a_machine(8), a_machine(4, gib=40, host_gib=256), a_machine(2, gib=16))
    ]
    found = weakest(hardware, nodes=2, gpus_per_node=4)
    assert [card.total_bytes for card in found.cards] == [40 * 2**30] * 4
    assert (found.host_bytes, found.driver) == (256 * 2**30, "580")
    assert [card.bf16 for card in found.cards] == [True] * 4
    old = replace(hardware[0], cards=tuple(replace(card, bf16=False) for card in hardware[0].cards))
    assert [card.bf16 for card in weakest([old, hardware[1]], nodes=2, gpus_per_node=4).cards] == [False] * 4


def test_too_few_nodes_with_enough_gpus_show_too_few_gpus() -> None:
    assert len(weakest([a_machine(8), a_machine(2), a_machine(0)], nodes=2, gpus_per_node=4).cards) == 2


def test_a_cluster_without_gpus_shows_none() -> None:
    assert weakest([a_machine(0), a_machine(0)], nodes=2, gpus_per_node=4).cards == ()


def test_a_look_at_a_node_takes_no_card_and_sees_all() -> None:
    variables = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    assert see_all_cards(CUDA) == {"runtime_env": {"env_vars": variables}}
    assert see_all_cards(CPU) == {}


@pytest.mark.parametrize(("sound", "problem"), [(1, "torch 2.13.0 is built without CUDA"), (2, None)])
def test_cards_that_torch_cannot_use_are_said_of_a_cluster_too(sound: int, problem: str | None) -> None:
    broken = replace(a_machine(8), unusable="torch 2.13.0 is built without CUDA")
    assert weakest([broken, *[a_machine(8)] * sound], nodes=2, gpus_per_node=4).unusable == problem
