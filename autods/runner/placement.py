"""Choose the nodes of a Ray cluster for the ranks: all of them or none, and only nodes that go together."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..config.settings import Settings
from ..devices import Device, find_device
from ..errors import AutodsError, EnvironmentBroken
from ..system.host import Hardware, read_hardware
from ..units import format_bytes
from .ray_connect import find_head_problem, format_ray_error, ray_internal, session

_LOOK_EVERY_S = 1.0
_SILENT_S = 5.0  # a shorter wait is not reported
_REPORT_EVERY_S = 60.0
_ANSWERS_S = 120.0  # the first task on a node takes some seconds: Ray starts a worker there, which gets our package
_SAME_SOFTWARE = ("python", "torch", "deepspeed", "transformers")  # ranks of one job need the same versions


class NoRoom(EnvironmentBroken):
    """The cluster has no free room for one more runner now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What the ranks need of Ray: `bundle` on each of `nodes` nodes. `resource` is Ray's name of what ranks take."""

    nodes: int
    resource: str
    bundle: Mapping[str, float]

    @classmethod
    def of_settings(cls, settings: Settings) -> Need:
        """What the ranks of these settings need. A Ray of our own has nobody else to share CPUs with."""
        device = find_device(settings.device)
        bundle = device.list_resources(settings.ranks_per_node, shared=settings.address is not None)
        return cls(nodes=settings.nodes, resource=device.ray_resource, bundle=bundle)

    @property
    def count(self) -> int:
        """How many of `resource` each node needs."""
        return int(self.bundle[self.resource])

    @property
    def actor_options(self) -> dict[str, Any]:
        """The options of a Ray actor that takes all of a bundle."""
        others = {name: size for name, size in self.bundle.items() if name not in ("CPU", "GPU")}
        return {"num_cpus": self.bundle["CPU"], "num_gpus": self.bundle.get("GPU", 0.0), "resources": others}

    def __str__(self) -> str:
        each = _format_count(self.count, self.resource)
        return f"{each} on each of {self.nodes} nodes" if self.nodes > 1 else f"{each} on one node"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """A living node with its resources, as Ray counts them."""

    id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDescription:
    """The hardware of a node and the versions of its software."""

    address: str
    hardware: Hardware
    versions: Mapping[str, str]


class RayCluster:
    """The part of Ray that placement uses."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray

    def nodes(self) -> Sequence[NodeState]:
        """Return the nodes that are alive."""
        free = ray_internal("ray._private.state", "available_resources_per_node")()
        return [
            NodeState(
                id=node["NodeID"],
                address=node["NodeManagerAddress"],
                total=node["Resources"],
                free=free.get(node["NodeID"], {}),
            )
            for node in self.ray.nodes()
            if node["Alive"]
        ]

    def reserve(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        """Ask for a placement group; return its handle."""
        from ray.util.placement_group import placement_group

        return placement_group(bundles, strategy=strategy)

    def is_ready(self, group: Any, within_s: float) -> bool:
        """Wait for the group; return whether all of it is reserved."""
        return bool(group.wait(timeout_seconds=within_s))

    def node_ids(self, group: Any) -> list[str]:
        """Return the node of each bundle, in the order of the bundles."""
        from ray.util.placement_group import placement_group_table

        table = placement_group_table(group)["bundles_to_node_id"]
        return [table[bundle] for bundle in sorted(table)]

    def free(self, group: Any) -> None:
        """Give the group back."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(group)


def reserve_nodes(
    cluster: RayCluster,
    need: Need,
    *,
    report: Callable[[str], None],
    first: str | None = None,
    within_s: float | None = None,
) -> tuple[Any, dict[int, NodeState]]:
    """Reserve a placement group; return it, and its nodes by the index of their bundle, in the order of their ranks.

    The node with the id `first` comes first: it gets rank 0. Waits, with a report, while others hold the resources.
    Raises EnvironmentBroken when the cluster never can hold the ranks, NoRoom when it does not hold them `within_s`.
    """
    _check_possible(cluster, need)
    group = cluster.reserve([dict(need.bundle)] * need.nodes, "STRICT_SPREAD" if need.nodes > 1 else "STRICT_PACK")
    try:
        began, reported_s = time.monotonic(), -_REPORT_EVERY_S
        while (nodes := _find_nodes(cluster, group)) is None:
            _check_possible(cluster, need)
            waited_s = time.monotonic() - began
            if within_s is not None and waited_s >= within_s:
                raise NoRoom(_format_waiting(need, cluster.nodes()))
            if waited_s >= _SILENT_S and waited_s - reported_s >= _REPORT_EVERY_S:
                reported_s = waited_s
                report(_format_waiting(need, cluster.nodes()))
    except BaseException:
        cluster.free(group)
        raise

    def sort_key(item: tuple[int, NodeState]) -> tuple[bool, bytes, str]:
        """Sorts 10.0.0.9 before 10.0.0.10, fd00::9 before fd00::10, and names last."""
        id, address = item[1].id, item[1].address
        try:
            return id != first, ipaddress.ip_address(address).packed, ""
        except ValueError:  # `ray start --node-ip-address` takes a name, too
            return id != first, b"\xff" * 16, address

    return group, dict(sorted(nodes.items(), key=sort_key))


def _find_nodes(cluster: RayCluster, group: Any) -> dict[int, NodeState] | None:
    """The nodes of the group by the index of their bundle; None unless all are reserved, and still alive."""
    if not cluster.is_ready(group, _LOOK_EVERY_S):
        return None
    alive = {node.id: node for node in cluster.nodes()}
    ids = cluster.node_ids(group)  # Ray reserves another node for one that has died since
    return {bundle: alive[id] for bundle, id in enumerate(ids)} if alive.keys() >= set(ids) else None


def _format_waiting(need: Need, nodes: Sequence[NodeState]) -> str:
    """A sentence with the resources that are needed, and those that are free on each node."""
    kind = need.resource
    free = ", ".join(
        f"{node.free.get(kind, 0):g} of {node.total[kind]:g} on {node.address}"
        for node in nodes
        if node.total.get(kind)
    )
    return f"waiting for {need} of the Ray cluster: {free} free"


def _check_possible(cluster: RayCluster, need: Need) -> None:
    """Raise EnvironmentBroken where too few nodes could hold their part while nobody else uses them."""
    nodes, kind = cluster.nodes(), need.resource
    if count_able(nodes, need) >= need.nodes:
        return
    totals = ", ".join(f"{node.address} {node.total.get(kind, 0):g}" for node in nodes) or "none"
    advice = "add nodes with `ray start --address HOST:PORT`, or use fewer ranks (--gpus)"
    ranks = need.count * need.nodes
    for count in range(1, len(nodes) + 1):  # the same ranks on another number of nodes
        enough = sum(node.total.get(kind, 0) >= ranks // count for node in nodes)
        if ranks % count == 0 and enough >= count:
            advice = f"--nodes {count} --gpus {ranks} would find room; or add nodes with `ray start --address`"
            break
    raise EnvironmentBroken(
        f"the ranks need {need}, and the Ray cluster has {_format_count(len(nodes), 'node')} ({kind}s: {totals})\n"
        f"  {advice}"
    )


def count_able(nodes: Sequence[NodeState], need: Need) -> int:
    """How many nodes could hold a node's part while nobody else uses them."""
    return sum(all(node.total.get(name, 0) >= size for name, size in need.bundle.items()) for node in nodes)


def count_ranks(settings: Settings) -> int | None:
    """Return the ranks that the machines have room for while nobody else uses them; None where that is not known.

    Those of a cluster are its living nodes that can hold as many ranks as the settings place on a node. On this machine
    they are its cards.
    """
    if settings.address is None:
        return (len(read_hardware().cards) or None) if find_device(settings.device).has_cards else None
    try:
        with session(cpus=1, address=settings.address) as ray:
            if find_head_problem(ray.get_runtime_context().gcs_address) is not None:
                return None  # Ray would wait for its head for a minute, and then end this process
            return count_able(RayCluster(ray).nodes(), Need.of_settings(settings)) * settings.ranks_per_node
    except AutodsError:
        return None


def _format_count(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def check_same_software(nodes: Sequence[NodeDescription]) -> None:
    """Raise EnvironmentBroken where the nodes differ in a version that their ranks need to share."""
    for name in _SAME_SOFTWARE:
        first = nodes[0].versions[name]
        other = next((node for node in nodes if node.versions[name] != first), None)
        if other is not None:
            raise EnvironmentBroken(
                f"the nodes differ in software: {name} {first} on {nodes[0].address}, {other.versions[name]} on "
                f"{other.address}\n  install the same on all: pip install {name}=={first}"
            )


def describe_gpu_differences(nodes: Sequence[NodeDescription]) -> str | None:
    """A sentence where the nodes have different GPUs, else None."""
    places: dict[tuple[str, int], list[str]] = {}
    for node in nodes:
        for card in node.hardware.cards:
            places.setdefault((card.name, card.total_bytes), []).append(node.address)
    if len(places) < 2:
        return None
    kinds = "; ".join(
        f"{len(addresses)} × {name} with {format_bytes(size)} on {', '.join(dict.fromkeys(addresses))}"
        for (name, size), addresses in places.items()
    )
    return f"the GPUs differ, the slowest and the smallest decide: {kinds}"


def weakest_of(address: str, *, gpus: int | None, nodes: int, device: str) -> Hardware:
    """Return the smallest GPUs and the least host memory among the `nodes` best nodes of the cluster.

    A rank's limit has to hold on every node that the rank may come to. Nothing of the nodes needs to be free.
    Raises InputError when no cluster answers.
    """
    kind = find_device(device)
    with session(cpus=1, address=address) as ray:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        task = ray.remote(num_cpus=0, max_retries=0, **see_all_cards(kind))(read_hardware)
        alive = RayCluster(ray).nodes()
        references = [
            task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)).remote()
            for node in [node for node in alive if node.total.get(kind.ray_resource)] or alive[:1]
        ]
        try:
            hardware = ray.get(references, timeout=_ANSWERS_S)
        except ray.exceptions.RayError as error:
            raise EnvironmentBroken(
                f"a node of the Ray cluster does not answer: {format_ray_error(error)}\n"
                "  `ray status` lists the nodes that are alive"
            ) from None
    return weakest(hardware, nodes=nodes, gpus_per_node=(gpus or 0) // nodes if kind.has_cards else 0)


def see_all_cards(device: Device) -> dict[str, Any]:
    """Return the options of a Ray task with which it sees the cards of its node, though it takes none.

    Releases of Ray before April 2026 hide all cards from such a task (github.com/ray-project/ray/pull/62492), and so do
    later ones where RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO is 1.
    """
    if device.visible_variable is None:
        return {}
    return {"runtime_env": {"env_vars": {f"RAY_EXPERIMENTAL_NOSET_{device.visible_variable}": "1"}}}


def weakest(hardware: Sequence[Hardware], *, nodes: int, gpus_per_node: int) -> Hardware:
    """Combine the nodes that have enough GPUs into the weakest that a rank could meet; see `weakest_of`."""
    usable = [node for node in hardware if len(node.cards) >= gpus_per_node]
    if len(usable) < nodes:  # the check of the request fails later, with the figures of the best nodes
        usable = sorted(hardware, key=lambda node: len(node.cards), reverse=True)[:nodes]
    fewest = min(usable, key=lambda node: (len(node.cards), node.cpu))  # the same one whatever the order of the nodes
    cards = sorted((card for node in usable for card in node.cards), key=lambda card: (card.usable_bytes, card.name))
    bf16 = all(card.bf16 for card in cards)
    problems = [node.unusable for node in usable if node.unusable is not None]
    return Hardware(
        cpu=fewest.cpu,
        cores=min(node.cores for node in usable),
        host_bytes=min(node.host_bytes for node in usable),
        host_free_bytes=min(node.host_free_bytes for node in usable),
        cards=tuple(replace(card, bf16=bf16) for card in cards[:1]) * len(fewest.cards),
        driver=fewest.driver,
        cuda=fewest.cuda,
        unusable=problems[0] if len(usable) - len(problems) < nodes and problems else None,
        numa_nodes=min(node.numa_nodes for node in usable),
        numactl=all(node.numactl for node in usable),
        process_bytes=min((node.process_bytes for node in usable if node.process_bytes is not None), default=None),
    )
