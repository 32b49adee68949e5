"""Place the ranks on the nodes of a Ray cluster, all or nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from ..errors import EnvironmentBroken
from ..system.gpus import Card
from ..system.host import Hardware, read_hardware
from .ray_connect import kept_session, said_by

_LOOK_S = 1.0
_SILENT_S = 5.0  # waiting for less is not worth a word
_AGAIN_S = 60.0


class NoRoom(EnvironmentBroken):
    """Nothing is free now for one more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Of each of so many nodes. cpus: for the ranks, where they are CPU ranks, else for the actor alone."""

    nodes: int
    cpus: int
    gpus: int

    @property
    def bundle(self) -> dict[str, float]:
        """As Ray's placement groups say it: what lies in one bundle lies on one node."""
        return {"CPU": float(self.cpus)} | ({"GPU": float(self.gpus)} if self.gpus else {})

    @property
    def strategy(self) -> str:
        """One bundle a node."""
        return "STRICT_SPREAD" if self.nodes > 1 else "STRICT_PACK"

    def __str__(self) -> str:
        each = _several(self.gpus, "GPU") if self.gpus else _several(self.cpus, "CPU")
        return f"{each} on each of {self.nodes} nodes" if self.nodes > 1 else f"{each} on one node"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """A living node as Ray counts it."""

    id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float] = field(default_factory=dict)

    def holds(self, need: Need, *, now: bool = False) -> bool:
        """Whether its part of the need finds room there, once nobody else is there or now."""
        has = self.free if now else self.total
        return all(has.get(name, 0.0) >= amount for name, amount in need.bundle.items())


class Places(Protocol):
    """What of Ray is needed to place; `RayPlaces` is the real one."""

    def nodes(self) -> Sequence[NodeState]:
        """Those that live."""

    def reserve(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        """Ask for a placement group; its handle."""

    def is_ready(self, group: Any, within_s: float) -> bool:
        """Whether it is all there."""

    def node_ids(self, group: Any) -> list[str]:
        """The node of each bundle, in their order."""

    def free(self, group: Any) -> None:
        """Give it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """One node's place: `bundle` of the group."""

    node: NodeState
    bundle: int


def reserve(
    places: Places,
    need: Need,
    *,
    say: Callable[[str], None],
    first: str | None = None,
    within_s: float | None = None,
) -> tuple[Any, tuple[Spot, ...]]:
    """The group and its spots, that on the node `first` (the driver's) before the others, so that rank 0 is at hand.

    Waits while others hold what is needed, and says so. Raises EnvironmentBroken when the cluster never can have it,
    NoRoom when it has not got it `within_s`.
    """
    _check_possible(places, need)
    group = places.reserve([need.bundle] * need.nodes, need.strategy)
    try:
        _wait(places, need, group, say, within_s)
        states = {node.id: node for node in places.nodes()}
        ids = places.node_ids(group)
        spots = [Spot(node=states[id], bundle=bundle) for bundle, id in enumerate(ids)]
    except BaseException:
        places.free(group)
        raise
    return group, tuple(sorted(spots, key=lambda spot: (spot.node.id != first, _by_number(spot.node.address))))


def _wait(places: Places, need: Need, group: Any, say: Callable[[str], None], within_s: float | None) -> None:
    began, told_s = time.monotonic(), -_AGAIN_S
    while not places.is_ready(group, _LOOK_S):
        _check_possible(places, need)
        waited_s = time.monotonic() - began
        if within_s is not None and waited_s >= within_s:
            raise NoRoom(waiting_for(need, places.nodes()))
        if waited_s >= _SILENT_S and waited_s - told_s >= _AGAIN_S:
            told_s = waited_s
            say(waiting_for(need, places.nodes()))


def waiting_for(need: Need, nodes: Sequence[NodeState]) -> str:
    """The sentence for who waits: what is needed and what is free where."""
    kind = "GPU" if need.gpus else "CPU"
    some = [node for node in nodes if node.total.get(kind)]
    free = ", ".join(f"{node.free.get(kind, 0):g} of {node.total[kind]:g} on {node.address}" for node in some)
    return f"waiting for {need} of the Ray cluster: {free} free"


def _check_possible(places: Places, need: Need) -> None:
    nodes = places.nodes()
    if sum(node.holds(need) for node in nodes) >= need.nodes:
        return
    kind = "GPU" if need.gpus else "CPU"
    has = ", ".join(f"{node.address} {node.total.get(kind, 0):g}" for node in nodes) or "none"
    raise EnvironmentBroken(
        f"the ranks need {need}, and the Ray cluster has {_several(len(nodes), 'node')} ({kind}s: {has})\n"
        f"  {_mend(need, nodes)}"
    )


def _mend(need: Need, nodes: Sequence[NodeState]) -> str:
    """What could be asked instead, if the same ranks find room otherwise."""
    kind, each = ("GPU", need.gpus) if need.gpus else ("CPU", need.cpus)
    ranks = each * need.nodes
    for count in range(1, len(nodes) + 1):
        if ranks % count == 0 and sum(node.total.get(kind, 0) >= ranks // count for node in nodes) >= count:
            return f"--nodes {count} --gpus {ranks} would find room; or add nodes with `ray start --address`"
    return "add nodes with `ray start --address HOST:PORT`, or ask for fewer ranks (--gpus)"


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _by_number(address: str) -> tuple[tuple[int, str], ...]:
    """10.0.0.9 before 10.0.0.10."""
    return tuple((int(part), "") if part.isdigit() else (0, part) for part in address.split("."))


class RayPlaces:
    """`Places` of a connected Ray."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray

    def nodes(self) -> Sequence[NodeState]:
        free = self._free()
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

    def _free(self) -> dict[str, dict[str, float]]:
        try:
            from ray._private.state import available_resources_per_node

            found: dict[str, dict[str, float]] = available_resources_per_node()
        except (ImportError, AttributeError):
            return {}
        return found

    def reserve(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        from ray.util.placement_group import placement_group

        return placement_group(bundles, strategy=strategy)

    def is_ready(self, group: Any, within_s: float) -> bool:
        return bool(group.wait(timeout_seconds=within_s))

    def node_ids(self, group: Any) -> list[str]:
        from ray.util.placement_group import placement_group_table

        table = placement_group_table(group)["bundles_to_node_id"]
        return [table[bundle] for bundle in sorted(table)]

    def free(self, group: Any) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(group)


_ANSWER_S = 120.0  # the first look at a node takes Ray some seconds: a worker has to start there, and get our package


def weakest_of(address: str, *, gpus: int | None, nodes: int, device: str) -> Hardware:
    """Of the `nodes` best nodes of the cluster the one with the smallest cards and the least host memory.

    A rank's limit has to hold on every node that it may come to. Raises InputError when no cluster answers.
    """
    kind = "GPU" if device == "cuda" else "CPU"
    return weakest(all_of(address, kind), nodes=nodes, each=(gpus or 0) // nodes if device == "cuda" else 0)


def weakest(seen: Sequence[Hardware], *, nodes: int, each: int) -> Hardware:
    """See `weakest_of`; each: cards that a node needs."""
    fit = [one for one in seen if len(one.cards) >= max(1, each)] if each else list(seen)
    if len(fit) < nodes:  # the check of what was asked says it with what the best of the others has
        fit = sorted(seen, key=lambda one: len(one.cards), reverse=True)[:nodes]
    least = min(fit, key=lambda one: len(one.cards))
    cards = [card for one in fit for card in one.cards]
    smallest = min(cards, key=lambda card: card.usable_bytes, default=None)
    return Hardware(
        cpu=least.cpu,
        cores=min(one.cores for one in fit),
        host_bytes=min(one.host_bytes for one in fit),
        host_free_bytes=min(one.host_free_bytes for one in fit),
        cards=tuple([smallest] * len(least.cards)) if smallest else (),
        process_bytes=min((one.process_bytes for one in fit if one.process_bytes is not None), default=None),
    )


def all_of(address: str, kind: str) -> list[Hardware]:
    """Of every living node that has a GPU, or CPU, for Ray. Needs no free one there."""
    with kept_session(address) as ray:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        task = ray.remote(num_cpus=0, max_retries=0)(_look)
        alive = RayPlaces(ray).nodes()
        nodes = [node for node in alive if node.total.get(kind)] or alive[:1]
        asked = [
            task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)).remote()
            for node in nodes
        ]
        try:
            return [hardware_of(said) for said in ray.get(asked, timeout=_ANSWER_S)]
        except ray.exceptions.RayError as error:
            raise EnvironmentBroken(
                f"a node of the Ray cluster does not answer: {said_by(error)}\n"
                "  `ray status` says which nodes there are"
            ) from None


def hardware_of(said: Mapping[str, Any]) -> Hardware:
    """The inverse of `asdict`."""
    return Hardware(**{**said, "cards": tuple(Card(**card) for card in said["cards"])})


def _look() -> dict[str, Any]:
    return asdict(read_hardware())
