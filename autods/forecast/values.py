"""What a forecast is made of: what is asked, what the simulated engine allocated, and what is said of a rung."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..outcomes import Tier
from ..values import Device

Verdict = Literal["fits", "tight", "cannot_fit", "not_applicable"]

# The phases of a forecast, in order. `init` includes building the model.
ForecastPhase = Literal["init", "forward", "backward", "step"]
PHASES: tuple[ForecastPhase, ...] = ("init", "forward", "backward", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One engine to simulate: the rung with its whole DeepSpeed config, as one rank of `world_size` runs it.

    device_bytes: the card's memory; DeepSpeed asks for what is free and branches on it. zero_init: build the model
    under `deepspeed.zero.Init` (stage 3 only). layers: keep only so many of the model's repeated layers, for an
    estimate; None: all.
    """

    rung: str
    ds_config: Mapping[str, Any]
    world_size: int
    ranks_per_node: int
    device_bytes: int
    device: Device = "cuda"
    checkpointing: bool = True
    zero_init: bool = False
    layers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The allocations of one tier in order.

    events: a value ≥ 0 allocates that many bytes (as asked for, not rounded); blocks are numbered from 0 in this order.
    A value < 0 frees block −value − 1. marks: (number of events before it, phase), ascending; a phase lasts until the
    next mark, and phases come again in the second step. unrounded: blocks that torch's allocator has no part in, such
    as the buffers that DeepSpeed's async_io page-locks itself. emptied: numbers of events before each empty_cache().
    copied: (number of events before it, bytes that a collective allocates inside and frees at its end), of CPU ranks.
    """

    events: Sequence[int]
    marks: tuple[tuple[int, ForecastPhase], ...]
    unrounded: frozenset[int] = frozenset()
    emptied: tuple[int, ...] = ()
    copied: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """One micro batch on a simulated engine, init and two optimizer steps.

    live_bytes: phase → tier → peak of the live tensors' bytes on the fullest rank (host, pinned: that rank's alone).
    traces: of the device and of pinned memory, for the allocators' replay. nvme_bytes: of this rank's swap files.
    breakdown: bytes on the device at the moment of the peak, by what they are: parameters, gradients, optimizer,
    activations, buckets, other. summed_peak_bytes: phase → peak of all tiers together, which is what one process holds
    when all tensors lie in its memory. optimizer_elements: elements that this rank's optimizer updates. expert_groups:
    process groups of this rank that layers of experts made, each with a communicator of its own.
    assumed: what the simulation had to assume or could not count, in sentences for the user.
    """

    micro_batch: int
    live_bytes: Mapping[ForecastPhase, Mapping[Tier, int]]
    traces: Mapping[Tier, Trace]
    nvme_bytes: int = 0
    optimizer_elements: int = 0
    expert_groups: int = 0
    summed_peak_bytes: Mapping[ForecastPhase, int] = field(default_factory=dict)
    breakdown: Mapping[str, int] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Peak bytes on one tier with an interval: device and pinned a rank, host and nvme a node."""

    peak_bytes: int
    low_bytes: int
    high_bytes: int
    limit_bytes: int | None = None

    @property
    def fill(self) -> float:
        """How full the tier is by the forecast itself, not an end of its interval; 0 where no limit is known."""
        return self.peak_bytes / self.limit_bytes if self.limit_bytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RungForecast:
    """What is said of one rung.

    exact: simulated in full; False: an estimate by a shortcut, which `assumed` names. live_peak_bytes: tensors alone,
    on the device. by_phase: what the card must hold in each phase. largest_micro_batch: the largest whose forecast (not
    its low end) fits; None when it was not looked for or none fits.
    """

    rung: str
    verdict: Verdict
    reason: str
    micro_batch: int
    memory: Mapping[Tier, Predicted] = field(default_factory=dict)
    live_peak_bytes: int = 0
    by_phase: Mapping[ForecastPhase, int] = field(default_factory=dict)
    breakdown: Mapping[str, int] = field(default_factory=dict)
    largest_micro_batch: int | None = None
    exact: bool = True
    assumed: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def fill(self) -> float:
        """Of the fullest tier."""
        return max((held.fill for held in self.memory.values()), default=0.0)

    @property
    def decides(self) -> ForecastPhase | None:
        """The phase whose peak decides."""
        if not self.by_phase:
            return None
        return max(self.by_phase, key=lambda phase: self.by_phase[phase])
