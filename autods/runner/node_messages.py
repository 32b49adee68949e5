"""The messages between a fit's process, the agents of its nodes, their zygotes and the ranks.

A rank writes its result or error into a file. A zygote sends its agent one JSON line a message. An agent answers the
fit with the same values, through Ray. Every moment is in seconds of a machine's monotonic clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, TypeAlias, cast

from ..diagnosis.evidence import HostUsage, RankEnd, RankError
from ..rank.record import JobResult
from ..schema import read_as
from ..types import Phase, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit(RankEnd):
    """The end of a rank as its node's monitor saw it, with the `result` that it wrote before it left."""

    killed_by_us: bool = False
    result: JobResult | None = None
    forward_s: float = 0.0  # that a forward of it took; 0: it did few

    @property
    def succeeded(self) -> bool:
        """Whether the rank left by itself, with a result."""
        return self.exit_code == 0 and self.result is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A zygote has loaded torch, DeepSpeed and the workload. `spawn_because` is the reason not to fork ranks."""

    kind: Literal["ready"] = "ready"
    pid: int
    spawn_because: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailed:
    """The user's module raised while a zygote imported it."""

    kind: Literal["load_failed"] = "load_failed"
    error: RankError


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBound:
    """A zygote listens on `port` for the rendezvous of the next job's ranks."""

    kind: Literal["store_bound"] = "store_bound"
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFailed:
    """A zygote could not listen where the ranks of other nodes would look for it."""

    kind: Literal["store_failed"] = "store_failed"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLevel:
    """The bytes in use on a tier of a node, and how many there are. A `node` that is the only one is ''."""

    tier: Tier
    used_bytes: int
    total_bytes: int
    node: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The phase and step of a node's slowest rank.

    No rank has moved for `silent_s`. `place` is the line of the user's code where one of them is, if that is known.
    For `awaits_s` all of them have been seen to wait for other ranks alone.
    `tiers` are the node's own while it trains in a run; in the heartbeat of a whole job they are those of the fullest
    node, tier by tier. `forward_s` are the usual seconds of a forward by rank, where a rank has done some. `throttled`
    has a sentence for each card that is slow now.
    """

    kind: Literal["heartbeat"] = "heartbeat"
    phase: Phase = "start"
    step: int = 0
    silent_s: float = 0.0
    place: str = ""
    awaits_s: float = 0.0
    tiers: tuple[TierLevel, ...] = ()
    forward_s: Mapping[str, float] = field(default_factory=dict)
    throttled: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """All ranks of a node's part of a job are gone, and so is everything they started, but `survivors`."""

    kind: Literal["report"] = "report"
    ranks: tuple[RankExit, ...]
    gone_at_s: float
    host: HostUsage | None = None
    killed_because: str | None = None  # why the watcher ended ranks that did not end by themselves
    swap_bytes: int | None = None
    notes: tuple[str, ...] = ()  # sentences for the user
    built_once: bool = False  # the ranks share the pages of one model, which another process holds beside them
    survivors: str = ""  # processes of the ranks that the kernel has not ended, with what they wait for

    @property
    def succeeded(self) -> bool:
        """Whether every rank left with a result."""
        return all(rank.succeeded for rank in self.ranks)

    def on_driver_clock(self, ahead_s: float) -> NodeReport:
        """The report with the times of a clock that is `ahead_s` behind the node's. Zero means unknown and stays."""
        ranks = tuple(replace(rank, at_s=rank.at_s - ahead_s if rank.at_s else 0.0) for rank in self.ranks)
        return replace(self, ranks=ranks, gone_at_s=self.gone_at_s - ahead_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygoteDied:
    """The process that forks a node's ranks died. `how` is 'killed by SIGKILL' or 'exit 3'."""

    how: str
    phase: Phase = "start"
    step: int = 0
    host: HostUsage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """A node's agent does not answer any more. `how` is the evidence."""

    address: str
    how: str


ZygoteMessage: TypeAlias = Ready | LoadFailed | StoreBound | StoreFailed | Heartbeat | NodeReport
NodeResult: TypeAlias = NodeReport | ZygoteDied | NodeLost | LoadFailed | StoreFailed
ABORT = b"abort"
GIVE_UP = b"give up"  # end the ranks as stuck ones
BIND = b"bind "  # then the address


def encode(message: ZygoteMessage) -> bytes:
    """One line of JSON."""
    return json.dumps(asdict(message)).encode() + b"\n"


def decode(line: bytes) -> ZygoteMessage:
    """The inverse of `encode`. Raises ValueError for anything else."""
    return read_as(cast(type[ZygoteMessage], ZygoteMessage), json.loads(line), name="message")
