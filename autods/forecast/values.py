"""The values of a forecast: intervals, simulated engines, the memory of a rung, and progress events."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, Protocol

from ..config.catalogue import Machine
from ..events import Note
from ..types import ModelFacts, Tier, WorkloadSource
from ..units import format_bytes
from .attention import FAMILIES, Capability, find_family
from .predict.step_time import Schedule, Speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """Factors of an interval's bounds; low ≤ middle ≤ high."""

    low: float = 1.0
    middle: float = 1.0
    high: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A forecast of bytes and its bounds: low_bytes ≤ peak_bytes ≤ high_bytes."""

    low_bytes: int = 0
    peak_bytes: int = 0
    high_bytes: int = 0

    def __add__(self, other: Interval) -> Interval:
        """Add bound to bound. The sum of independent parts is surer than that, so the result is rather too wide."""
        return Interval(
            low_bytes=self.low_bytes + other.low_bytes,
            peak_bytes=self.peak_bytes + other.peak_bytes,
            high_bytes=self.high_bytes + other.high_bytes,
        )

    def times(self, ratios: Ratios | int) -> Interval:
        """Multiply each bound by its ratio, or all by a count."""
        if isinstance(ratios, int):
            ratios = Ratios(low=ratios, middle=ratios, high=ratios)
        return Interval(
            low_bytes=int(self.low_bytes * ratios.low),
            peak_bytes=round(self.peak_bytes * ratios.middle),
            high_bytes=int(-(-self.high_bytes * ratios.high // 1)),
        )

    def __str__(self) -> str:
        """Return text such as '28.3 GiB (27.1 to 30.0)'."""
        peak, low, high = map(format_bytes, (self.peak_bytes, self.low_bytes, self.high_bytes))
        if low == peak == high:
            return peak
        units = {text.rpartition(" ")[2] for text in (peak, low, high)}
        if len(units) == 1:
            low, high = (text.rpartition(" ")[0] for text in (low, high))
        return f"{peak} ({low} to {high})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierForecast(Interval):
    """The forecast of one tier and its limit: device and pinned a rank, host and NVMe a node."""

    limit_bytes: int | None = None

    @property
    def fill(self) -> float:
        """The peak as a share of the limit; 0 where no limit is known."""
        return self.peak_bytes / self.limit_bytes if self.limit_bytes else 0.0


Verdict = Literal["fits", "tight", "cannot_fit", "not_applicable"]
# The phases of a forecast, in order. The model is built or loaded in the first, which ends with the engine's start.
ForecastPhase = Literal["build", "init", "forward", "backward", "step"]
PHASES: tuple[ForecastPhase, ...] = ("build", "init", "forward", "backward", "step")
STARTING: tuple[ForecastPhase, ...] = ("build", "init")  # before the first step
_LEAST_OF_A_WEIGHT = 2  # bytes, of a model that is built in half precision
KINDS = ("parameters", "gradients", "optimizer", "activations", "buckets", "other")  # of bytes on the device


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """An engine to simulate: a rung with its whole DeepSpeed config, as one rank of `world_size` runs it.

    DeepSpeed asks for the free memory of the card, of which `device_bytes` is the total, and branches on it.
    `zero_init` builds the model under `deepspeed.zero.Init` (stage 3 only). `expandable` is that of its knobs.
    `machine` is the target of the forecast. Where it has rates, clocks tell when streams are done with a block.
    """

    rung: str
    ds_config: Mapping[str, Any]
    world_size: int
    ranks_per_node: int
    device_bytes: int
    device: str = "cuda"
    checkpointing: bool | int = True  # as in knobs
    zero_init: bool = False
    expandable: bool = False
    machine: Machine | None = None

    @property
    def capability(self) -> Capability | None:
        """The card's compute capability; None where it is unknown."""
        return None if self.machine is None else self.machine.capability

    @property
    def ranks_of_node(self) -> int:
        """The ranks of a node that is full, or of the only one."""
        return min(self.ranks_per_node, self.world_size)

    @property
    def family(self) -> Capability:
        """The cards that choose kernels of attention as this one does."""
        return find_family(self.capability)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The allocations of one tier in order.

    `events`: a value ≥ 0 allocates that many bytes, before any rounding. Blocks are numbered from 0 in this order.
    A value < 0 frees block −value − 1.
    `marks` are pairs (number of events before it, phase), ascending. A phase lasts until the next mark.
    The second step repeats the phases.
    `unrounded` are blocks that torch's allocator does not hold, such as buffers that DeepSpeed's async_io page-locks.
    `emptied` has the number of events before each empty_cache().
    `copied` are pairs (number of events before it, bytes): memory that a CPU rank's collective allocates and frees.
    `streams` has the stream on which each block was allocated; none: all on the first.
    `issued` has for each event how much work was issued before it, counted as `Schedule.first` is.
    `kinds` has the kind of each block, a place in `KINDS`.
    `held` has the blocks that another stream still used when they were freed (`record_stream`). It maps each to a
    number of events: after so many the allocator can give it out again, at the latest. `users` has these streams, as
    the schedule numbers them.
    """

    events: Sequence[int]
    marks: tuple[tuple[int, ForecastPhase], ...]
    unrounded: frozenset[int] = frozenset()
    emptied: tuple[int, ...] = ()
    copied: tuple[tuple[int, int], ...] = ()
    streams: Sequence[int] = ()
    held: Mapping[int, int] = field(default_factory=dict)
    users: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    issued: Sequence[int] = ()
    kinds: Sequence[int] = ()

    def split_peak(self) -> dict[str, int]:
        """Return the bytes at the moment of the highest peak, by kind; nothing where the kinds are not known."""
        if not self.kinds:
            return {}
        sizes = [event for event in self.events if event >= 0]
        totals = list(accumulate(event if event >= 0 else -sizes[~event] for event in self.events))
        until_peak = self.events[: totals.index(max(totals)) + 1] if totals else self.events
        freed = {~event for event in until_peak if event < 0}
        by_kind = dict.fromkeys(KINDS, 0)
        for block, size in enumerate(event for event in until_peak if event >= 0):
            if block not in freed:
                by_kind[KINDS[self.kinds[block]]] += size
        return {kind: size for kind, size in by_kind.items() if size}


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """One micro batch on a simulated engine: build, init and two optimizer steps of one rank.

    `live_bytes` is the peak of the live tensors' bytes, by phase and tier.
    `traces` are those of the device and of pinned memory, which the models of the allocators replay.
    `nvme_bytes` is the size of the rank's swap files.
    `optimizer_elements` counts the elements that the rank's optimizer updates.
    `further_groups` counts the rank's process groups beside that of all ranks, of experts, AutoTP, Ulysses and hpZ.
    `modules` counts those of the model.
    `communicators` counts the process groups of several ranks in which the rank communicates.
    `families` are the cards (see `attention`) that take the same kernels of attention as the simulated one.
    `summed_peak_bytes` is the peak of the tensors of all tiers, by phase: a CPU rank holds all in its memory.
    `breakdown` splits the device's peak into parameters, gradients, optimizer, activations, buckets and other.
    `is_upper_bound` says that the largest size stood for one that is not known, or eager code for compiled code.
    `schedule` has the work of the last optimizer step; None for CPU ranks.
    `assumed` has sentences for the user about assumptions and about memory that could not be counted.
    """

    micro_batch: int
    live_bytes: Mapping[ForecastPhase, Mapping[Tier, int]]
    traces: Mapping[Tier, Trace]
    nvme_bytes: int = 0
    optimizer_elements: int = 0
    further_groups: int = 0
    modules: int = 0
    communicators: int = 0
    families: frozenset[Capability] = frozenset(FAMILIES)
    summed_peak_bytes: Mapping[ForecastPhase, int] = field(default_factory=dict)
    breakdown: Mapping[str, int] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    is_upper_bound: bool = False
    schedule: Schedule | None = None
    seconds: float = 0.0

    def builds_whole(self, parameters: int) -> bool:
        """Whether the rank held that many parameters, in half precision at least, while it built its model."""
        return sum(self.live_bytes.get("build", {}).values()) >= _LEAST_OF_A_WEIGHT * parameters

    def holds_as(self, other: Simulation) -> bool:
        """Return whether both hold the same bytes on every tier, and allocate them in the same order."""
        events, others = ({tier: trace.events for tier, trace in each.traces.items()} for each in (self, other))
        return self.live_bytes == other.live_bytes and events == others


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RungForecast:
    """The memory that one rung needs at one micro batch, and its verdict.

    `live_peak_bytes` counts tensors alone, on the device. `overhead_bytes` is the part of the device's peak that the
    replay of torch's allocator does not hold: the CUDA context, communicators, workspaces, corrections by trials.
    `by_phase` has the bytes that the card must hold in each phase, and `host_by_phase` those of a node's host.
    `largest_micro_batch` is the largest whose peak fits; None when it was not searched for or none fits.
    `speed` is that of the largest micro batch, or of this one; None where the machine has no prices.
    `expandable` tells that torch's allocator grows its segments there, and `offloads_inputs` that layers recompute
    from inputs on the host.
    """

    rung: str
    verdict: Verdict
    reason: str
    micro_batch: int
    memory: Mapping[Tier, TierForecast] = field(default_factory=dict)
    live_peak_bytes: int = 0
    overhead_bytes: int = 0
    by_phase: Mapping[ForecastPhase, int] = field(default_factory=dict)
    host_by_phase: Mapping[ForecastPhase, int] = field(default_factory=dict)
    breakdown: Mapping[str, int] = field(default_factory=dict)
    largest_micro_batch: int | None = None
    speed: Speed | None = None
    expandable: bool = False
    offloads_inputs: bool = False
    assumed: tuple[str, ...] = ()
    seconds: float = 0.0

    def __repr__(self) -> str:
        """'<RungForecast: zero2, micro batch 4: fits, needs 31.2 GiB of 79.1 GiB>'; its fields are many."""
        verdict = self.verdict.replace("_", " ")
        return f"<RungForecast: {self.rung}, micro batch {self.micro_batch}: {verdict}, {self.reason}>"

    @property
    def fill(self) -> float:
        """The peak of the fullest tier as a share of its limit."""
        return max((held.fill for held in self.memory.values()), default=0.0)

    @property
    def fills(self) -> Mapping[str, float]:
        """The shares of the limits: of each tier's peak, and of what the card must hold in each phase."""
        device = self.memory.get("device")
        limit_bytes = (device.limit_bytes if device is not None else None) or math.inf
        phases: dict[str, float] = {phase: size / limit_bytes for phase, size in self.by_phase.items()}
        return {**{tier: held.fill for tier, held in self.memory.items()}, **phases}

    @property
    def decides(self) -> ForecastPhase | None:
        """The phase with the largest peak on the device."""
        return max(self.by_phase, key=self.by_phase.__getitem__, default=None)

    @property
    def host_after_start_bytes(self) -> int:
        """The peak of a node's host from the first step on."""
        return max((size for phase, size in self.host_by_phase.items() if phase not in STARTING), default=0)

    @property
    def host_is_fullest_at_start(self) -> bool:
        """Whether a node's host holds most before the first step."""
        return max(self.host_by_phase.values(), default=0) > self.host_after_start_bytes


BUILT_BY_SCRIPT = (
    "the script builds the model: build it inside `with deepspeed.zero.Init(config_dict_or_path=ds_config):`, or a"
    " transformers model by from_pretrained() or from_config() after TrainingArguments(deepspeed=…) or"
    " HfDeepSpeedConfig(ds_config) was made, and while it is kept in a variable"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionedBuild:
    """What `--zero-init` changes of a stage-3 rung that lacks memory while each rank builds the whole model.

    `whole_bytes` is what must be held in `tier` without it, and `split_bytes` with it: of the host a node's, of the
    device a rank's. `ranks` are those of a node, and `verdict` that of the rung with the split model. `obstacle` says
    why the option cannot be given yet, and what to do in the code; then `split_bytes` is None.
    """

    rung: str
    verdict: Verdict
    tier: Tier
    ranks: int
    whole_bytes: int
    split_bytes: int | None = None
    limit_bytes: int | None = None
    obstacle: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationStarted:
    """The simulation of a rung's micro batch begins."""

    rung: str
    micro_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RungFinished:
    """The forecast of a rung on a machine is there; `done` of `total` are."""

    machine: str
    forecast: RungForecast
    done: int
    total: int


ForecastEvent = Note | SimulationStarted | RungFinished
ForecastListener = Callable[[ForecastEvent], None]


class Engine(Protocol):
    """A simulated engine: each micro batch is measured as if it were the first."""

    def measure(self, micro_batch: int) -> Simulation: ...


class Simulator(Protocol):
    """Simulates engines of one workload. Thread-safe; calls raise SimulationFailed with a message for the user."""

    def facts(self, device: str = "cuda", *, ranks: int = 1, machine: Machine | None = None) -> ModelFacts: ...

    def engine(self, ask: EngineSpec) -> AbstractContextManager[Engine]: ...

    def simulate(self, ask: EngineSpec, micro_batches: Sequence[int]) -> tuple[Simulation, ...]:
        """Simulate each micro batch in turn."""
        with self.engine(ask) as engine:
            return tuple(engine.measure(micro_batch) for micro_batch in micro_batches)


StartSimulator = Callable[[WorkloadSource], AbstractContextManager[Simulator]]
