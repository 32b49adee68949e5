"""A job's parts: the share of a job that each node does, and how long it may take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..rank.job import RankJob
from ..system.waiting import MOST_LIMITS, Wait
from ..types import Tier
from .node_messages import Heartbeat, NodeLost, TierLevel

SILENT_S = 120.0  # a node whose agent does not answer for so long is lost; one that swaps may take a minute
MARGIN_S = 15.0  # on top of the limits that a node itself keeps


@dataclass(slots=True, eq=False)
class Node:
    """One node and its agent.

    `ahead_s` is how far its monotonic clock is ahead of ours.
    `lost` is the reason that the node is not used again.
    """

    address: str
    agent: Any  # the Ray actor of a NodeAgent
    ahead_s: float = 0.0
    lost: str | None = None

    def lose(self, how: str) -> NodeLost:
        """Do not use the node again."""
        self.lost = how
        return NodeLost(address=self.address, how=how)


@dataclass(slots=True, eq=False)
class RunningPart:
    """What a node does: the references of a call of its agent and of a `progress` that has no answer yet.

    `within_s` is the longest that it may take, `end_s` the longest after it was told to end. `first_s` is the longest
    until the agent answers at all: Ray may have to start it.
    """

    node: Node
    run: Any
    within_s: float
    end_s: float = 0.0
    first_s: float = 0.0
    work: Wait = field(default_factory=Wait)  # since it began
    silence: Wait = field(default_factory=Wait)  # since the agent has answered
    progress: Any = None
    heartbeat: Heartbeat | None = None
    result: Any = None

    @classmethod
    def of_job(cls, node: Node, job: RankJob, run: Any, silence: Wait) -> RunningPart:
        """A job, for which the agent may have to start another zygote first."""
        within_s = job.silence_s["start"] + job.wall_s + job.end_s + MARGIN_S
        return cls(node, run, within_s, job.end_s, silence=silence)

    def find_loss(self, abort_from_s: float = math.inf) -> str | None:
        """Return why the node counts as lost; None while it may still answer."""
        silent_s, end_s = max(SILENT_S, self.end_s), self.end_s + MARGIN_S
        if self.heartbeat is None:
            silent_s = max(silent_s, self.first_s)
        if self.silence.look() > silent_s:
            return f"it has not answered for {silent_s:.0f} s"
        if time.monotonic() - abort_from_s > end_s:
            return f"it has not ended the trial {end_s:.0f} s after it was told to"
        if self.work.look() > self.within_s:
            return f"it has not done its part within {self.within_s:.0f} s"
        return None


def measure_clock(read: Callable[[], float]) -> float:
    """Return how far a node's clock, as `read` tells it, is ahead of ours: by the quickest of some answers."""

    def measure() -> tuple[float, float]:
        began = time.monotonic()
        clock = read()
        ended = time.monotonic()
        return ended - began, clock - (began + ended) / 2

    return min(measure() for _ in range(3))[1]


def join_heartbeats(parts: Sequence[RunningPart]) -> Heartbeat:
    """Return the heartbeat of a whole job: that of the slowest node, and what all nodes have seen."""
    beats = [(part.node.address, part.heartbeat) for part in parts if part.heartbeat is not None]
    several = len(parts) > 1
    return replace(
        min((beat for _, beat in beats), key=lambda beat: beat.step),
        tiers=find_fullest(parts),
        forward_s={rank: seconds for _, beat in beats for rank, seconds in beat.forward_s.items()},
        throttled=tuple(
            f"node {address}: {text}" if several else text for address, beat in beats for text in beat.throttled
        ),
    )


def await_each_other(parts: Sequence[RunningPart], job: RankJob) -> bool:
    """Whether the ranks of all nodes have waited for other ranks alone for so long that nobody is left to come."""
    beats = [part.heartbeat for part in parts if part.heartbeat is not None and part.result is None]
    if len(parts) < 2 or len(beats) < len(parts):
        return False
    limit_s = max(job.silence_s[beat.phase] for beat in beats)
    return min(beat.awaits_s for beat in beats) > MOST_LIMITS * limit_s


def find_fullest(parts: Sequence[RunningPart]) -> tuple[TierLevel, ...]:
    """Return for each tier the node of which the least is left, as their heartbeats say. One node needs no name."""
    fullest: dict[Tier, TierLevel] = {}
    for part in parts:
        for use in part.heartbeat.tiers if part.heartbeat is not None else ():
            known = fullest.get(use.tier)
            if known is None or use.total_bytes - use.used_bytes < known.total_bytes - known.used_bytes:
                fullest[use.tier] = replace(use, node=part.node.address if len(parts) > 1 else "")
    return tuple(fullest.values())


def repeat_job(job: RankJob, nodes: Sequence[Node]) -> list[tuple[Node, RankJob]]:
    """Let every node do the whole job by itself, each in a separate folder."""
    parts = []
    for number, node in enumerate(nodes):
        folder = path_of_node(job.folder, number)
        parts.append((node, replace(job, folder=folder, scratch=folder + job.scratch.removeprefix(job.folder))))
    return parts


def split_job(job: RankJob, nodes: Sequence[Node], ranks_per_node: int, port: int | None) -> list[tuple[Node, RankJob]]:
    """Give each node consecutive ranks. A job that fits on one node stays whole.

    `port` is that of the rendezvous on the first node.
    """
    if job.world_size <= ranks_per_node:
        return [(nodes[0], job)]
    parts = []
    for number, first in enumerate(range(0, job.world_size, ranks_per_node)):
        node = nodes[number]
        part = replace(
            job,
            local_ranks=tuple(range(first, min(first + ranks_per_node, job.world_size))),
            node_rank=number,
            node_address=node.address,
            master_address=nodes[0].address,
            master_port=port,
            shared=f"{job.folder}/shared",
            scratch=path_of_node(job.scratch, number),
        )
        if job.swap is not None:
            swap = path_of_node(job.swap, number)
            part = replace(part, swap=swap, ds_config=_replace_path(job.ds_config, job.swap, swap))
        parts.append((node, part))
    return parts


def path_of_node(path: str, number: int) -> str:
    """A path for that node alone: several nodes may be one machine or share a folder. The first gets `path` itself."""
    return path if number == 0 else f"{path}-node{number}"


def _replace_path(config: Any, path: str, other: str) -> Any:
    """The config with every value `path` replaced by `other`."""
    if isinstance(config, Mapping):
        return {key: _replace_path(value, path, other) for key, value in config.items()}
    return other if config == path else config
