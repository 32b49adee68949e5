"""Actors on the nodes of a cluster, as a scripted Ray shows what it was asked for: cards, bundles, and what is said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autods.errors import EnvironmentBroken
from autods.events import Note
from autods.requests import Settings, resolve
from autods.runner import agent, worker_group
from autods.runner.agent import Node, digest_of
from autods.runner.nodes import check_alike, differences, muster, need_of
from autods.runner.placement import NodeState, Spot, weakest
from autods.system.gpus import Card
from autods.system.host import Hardware
from autods.types import WorkloadSource

SOURCE = WorkloadSource(kind="file", path="/model.py", name="model", digest="1")
VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "deepspeed": "0.19.8", "transformers": "5.23"}


def cards(count: int, *, gib: int = 80, name: str = "A100") -> tuple[Card, ...]:
    return tuple(Card(index=n, name=name, total_bytes=gib * 2**30, free_bytes=gib * 2**30) for n in range(count))


def a_machine(count: int = 4, *, gib: int = 80, name: str = "A100", host_gib: int = 512) -> Hardware:
    host = host_gib * 2**30
    return Hardware(cpu="EPYC", cores=64, host_bytes=host, host_free_bytes=host, cards=cards(count, gib=gib, name=name))


def settings(**asked: Any) -> Settings:
    said = {"gpus": 8, "nodes": 2, "address": "10.0.0.1:6379", **asked}
    return resolve(SOURCE, hardware=a_machine(8), **said)


def spot(number: int, bundle: int) -> Spot:
    total = {"CPU": 64.0, "GPU": 4.0}
    return Spot(node=NodeState(id=f"id{number}", address=f"10.0.0.{number}", total=total, free=total), bundle=bundle)


def what_is(machine: Hardware, **versions: str) -> dict[str, Any]:
    return {"hardware": asdict(machine), "versions": {**VERSIONS, **versions}}


class Ray:
    """Two nodes; `options` of each actor that was asked for, `killed` of those that were ended."""

    class exceptions:
        class RayActorError(Exception): ...

    def __init__(self, *machines: Mapping[str, Any]) -> None:
        self.machines, self.options, self.killed, self.calls = list(machines), [], 0, []
        self.unseen: list[str] = []

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "id1", gcs_address="10.0.0.1:6379")

    def remote(self, **options: Any) -> Any:
        number = len(self.options)
        self.options.append(options)
        return lambda cls: SimpleNamespace(remote=lambda *args, **named: Actor(self, number))

    def get(self, references: Any, timeout: float | None = None) -> Any:
        return references

    def kill(self, actor: Any) -> None:
        self.killed += 1


class Actor:
    def __init__(self, ray: Ray, number: int) -> None:
        self.unseen = SimpleNamespace(remote=lambda files, folders: ray.unseen)
        for name in ("start", "abort", "stop"):
            setattr(self, name, SimpleNamespace(remote=lambda *args, name=name: ray.calls.append((number, name)) or {}))
        self.seen = SimpleNamespace(remote=lambda: ray.machines[number])
        self.clock = SimpleNamespace(remote=lambda: 0.0)


class Places:
    """Both bundles, the second on the driver's node."""

    def __init__(self) -> None:
        self.bundles: list[dict[str, float]] = []
        self.freed = 0

    def nodes(self) -> list[NodeState]:
        return [spot(1, 0).node, spot(2, 0).node]

    def reserve(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        self.bundles = bundles
        return SimpleNamespace(bundle_specs=bundles)

    def is_ready(self, group: Any, within_s: float) -> bool:
        return True

    def node_ids(self, group: Any) -> list[str]:
        return ["id2", "id1"]

    def free(self, group: Any) -> None:
        self.freed += 1


@pytest.fixture(autouse=True)
def _head_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group.Team, "check_head", lambda team: None)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def gathered(ray: Ray, places: Places, said: list[str]) -> Any:
    def listen(event: Any) -> None:
        assert isinstance(event, Note)
        said.append(event.text)

    return muster(ray, settings(), listen, environment={}, places=places)


def test_each_actor_has_the_cards_of_its_node_in_its_own_bundle_the_drivers_node_first() -> None:
    ray, places = Ray(what_is(a_machine()), what_is(a_machine())), Places()
    team = gathered(ray, places, []).team
    assert places.bundles == [{"CPU": 1.0, "GPU": 4.0}] * 2
    assert [one["num_gpus"] for one in ray.options] == [4, 4]
    assert [one["scheduling_strategy"].placement_group_bundle_index for one in ray.options] == [1, 0]
    assert [member.node.address for member in team.members] == ["10.0.0.1", "10.0.0.2"]


def test_it_is_said_where_the_ranks_are() -> None:
    said: list[str] = []
    gathered(Ray(what_is(a_machine()), what_is(a_machine())), Places(), said)
    assert any("4 ranks on each of 10.0.0.1, 10.0.0.2" in text for text in said)


def test_nodes_with_different_software_are_refused_before_anything_loads_and_all_is_given_back() -> None:
    ray, places = Ray(what_is(a_machine()), what_is(a_machine(), torch="2.9.0")), Places()
    with pytest.raises(EnvironmentBroken, match=r"torch 2\.13\.0 on 10\.0\.0\.1, 2\.9\.0 on 10\.0\.0\.2"):
        gathered(ray, places, [])
    assert "start" not in [name for _, name in ray.calls]
    assert (ray.killed, places.freed) == (2, 1)


def test_a_folder_that_a_node_does_not_share_is_said_before_anything_loads() -> None:
    ray = Ray(what_is(a_machine()), what_is(a_machine()))
    ray.unseen = ["/home/me/model.py"]
    with pytest.raises(EnvironmentBroken, match=r"10\.0\.0\.1 does not see /home/me/model\.py"):
        gathered(ray, Places(), [])
    assert "start" not in [name for _, name in ray.calls]


def test_a_node_sees_a_file_only_if_it_is_the_same(tmp_path: Path) -> None:
    here = tmp_path / "model.py"
    here.write_text("one")
    node = Node(asdict(SOURCE), "cpu", {"pid": 1, "machine": "another"}, "log", {})
    same, folder = digest_of(str(here)), str(tmp_path)
    assert same is not None
    assert node.unseen({str(here): same}, [folder]) == []
    assert node.unseen({str(here): "of another text"}, [folder]) == [str(here)]
    assert node.unseen({str(tmp_path / "gone"): same}, [folder, "/nowhere"]) == [str(tmp_path / "gone"), "/nowhere"]


def test_software_that_no_rank_uses_may_differ() -> None:
    check_alike([what_is(a_machine()), what_is(a_machine(), optuna="5.1")], [spot(1, 0), spot(2, 1)])


def test_different_cards_are_said_with_their_place() -> None:
    seen = [what_is(a_machine()), what_is(a_machine(gib=40))]
    (said,) = differences(seen, [spot(1, 0), spot(2, 1)])
    assert "4 × A100 with 80.0 GiB on 10.0.0.1" in said
    assert "4 × A100 with 40.0 GiB on 10.0.0.2" in said
    assert differences(seen[:1] * 2, [spot(1, 0), spot(2, 1)]) == []


@pytest.mark.parametrize(
    ("asked", "cpus", "gpus"),
    [
        ({}, 1, 4),
        ({"device": "cpu", "gpu_memory": "1GiB"}, 4, 0),
        ({"device": "cpu", "gpu_memory": "1GiB", "nodes": None, "address": None}, 1, 0),
    ],
)
def test_cpu_ranks_need_a_processor_each_where_the_cluster_is_shared(
    asked: dict[str, Any], cpus: int, gpus: int
) -> None:
    need = need_of(settings(**asked))
    assert (need.cpus, need.gpus) == (cpus, gpus)


def test_the_cards_that_ray_gave_the_actor_are_the_zygotes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert agent._environment("cuda", {"CUDA_VISIBLE_DEVICES": "0"})["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert agent._environment("cpu", {})["CUDA_VISIBLE_DEVICES"] == ""


def test_a_package_that_ray_brought_is_found_by_the_zygote(monkeypatch: pytest.MonkeyPatch) -> None:
    brought = Path("/ray/runtime_resources/py_modules_files/_ray_pkg_1")
    monkeypatch.setattr(agent, "__file__", str(brought / "autods/cluster/launch.py"))
    assert agent._environment("cpu", {"PYTHONPATH": "/own"})["PYTHONPATH"] == f"{brought}:/own"


def test_the_weakest_of_the_nodes_that_can_hold_the_ranks_decides() -> None:
    seen = [a_machine(8), a_machine(4, gib=40, host_gib=256), a_machine(2, gib=16)]
    found = weakest(seen, nodes=2, each=4)
    assert [card.total_bytes for card in found.cards] == [40 * 2**30] * 4
    assert found.host_bytes == 256 * 2**30


def test_too_few_nodes_with_enough_cards_leave_too_few_cards_to_see() -> None:
    assert len(weakest([a_machine(8), a_machine(2), a_machine(0)], nodes=2, each=4).cards) == 2


def test_a_cluster_without_cards_shows_none() -> None:
    assert weakest([a_machine(0), a_machine(0)], nodes=2, each=4).cards == ()
