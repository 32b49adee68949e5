"""What the nodes of a Ray cluster have, asked before a fit begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..errors import EnvironmentBroken
from ..hardware import Card, Hardware, look
from .placing import RayPlaces
from .ray_init import said_by
from .ray_session import kept_session

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
    return asdict(look())
