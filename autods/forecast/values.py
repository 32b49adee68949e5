"""The values of a forecast: intervals, what is simulated, what a rung needs, and progress events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ..events import Note
from ..types import Device, ModelFacts, Tier, WorkloadSource
from ..units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """What a forecast is multiplied by; low ≤ middle ≤ high."""

    low: float = 1.0
    middle: float = 1.0
    high: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """low_bytes ≤ peak_bytes ≤ high_bytes."""

    low_bytes: int = 0
    peak_bytes: int = 0
    high_bytes: int = 0

    def __add__(self, other: Interval) -> Interval:
        """Both at once, bound to bound. Independent parts would be surer than that: it errs to the wide side."""
        return Interval(
            low_bytes=self.low_bytes + other.low_bytes,
            peak_bytes=self.peak_bytes + other.peak_bytes,
            high_bytes=self.high_bytes + other.high_bytes,
        )

    def times(self, ratios: Ratios | int) -> Interval:
        """Each bound by its ratio, or all by a count."""
        if isinstance(ratios, int):
            ratios = Ratios(low=ratios, middle=ratios, high=ratios)
        return Interval(
            low_bytes=int(self.low_bytes * ratios.low),
            peak_bytes=round(self.peak_bytes * ratios.middle),
            high_bytes=int(-(-self.high_bytes * ratios.high // 1)),
        )

    def __str__(self) -> str:
        """'28.3 GiB (27.1 to 30.0)'."""
        peak, low, high = (format_bytes(size) for size in (self.peak_bytes, self.low_bytes, self.high_bytes))
        if low == peak == high:
            return peak
        units = {text.rpartition(" ")[2] for text in (peak, low, high)}
        if len(units) == 1:
            low, high = (text.rpartition(" ")[0] for text in (low, high))
        return f"{peak} ({low} to {high})"


def exact_interval(size: int) -> Interval:
    """No doubt about it."""
    return Interval(low_bytes=size, peak_bytes=size, high_bytes=size)


def total(parts: Iterable[Interval]) -> Interval:
    """The sum."""
    return sum(parts, Interval())


Verdict = Literal["fits", "tight", "cannot_fit", "not_applicable"]
# The phases of a forecast, in order. `init` includes building the model.
ForecastPhase = Literal["init", "forward", "backward", "step"]
PHASES: tuple[ForecastPhase, ...] = ("init", "forward", "backward", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine to simulate: the rung with its whole DeepSpeed config, as one rank of `world_size` runs it.

    device_bytes: the card's memory; DeepSpeed asks for what is free and branches on it. zero_init: build the model
    under `deepspeed.zero.Init` (stage 3 only).
    """

    rung: str
    ds_config: Mapping[str, Any]
    world_size: int
    ranks_per_node: int
    device_bytes: int
    device: Device = "cuda"
    checkpointing: bool = True
    zero_init: bool = False


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
class Simulation:
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
class TierForecast:
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

    live_peak_bytes: tensors alone, on the device. by_phase: what the card must hold in each phase. largest_micro_batch:
    the largest whose forecast (not its low end) fits; None when it was not looked for or none fits.
    """

    rung: str
    verdict: Verdict
    reason: str
    micro_batch: int
    memory: Mapping[Tier, TierForecast] = field(default_factory=dict)
    live_peak_bytes: int = 0
    by_phase: Mapping[ForecastPhase, int] = field(default_factory=dict)
    breakdown: Mapping[str, int] = field(default_factory=dict)
    largest_micro_batch: int | None = None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationStarted:
    """A micro batch of a rung is being simulated."""

    rung: str
    micro_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RungFinished:
    """A rung is done on a machine; `done` of `total` rungs are."""

    machine: str
    forecast: RungForecast
    done: int
    total: int


ForecastEvent = Note | SimulationStarted | RungFinished
ForecastListener = Callable[[ForecastEvent], None]


class Engine(Protocol):
    """A simulated engine that is initialised and stays so."""

    def measure(self, micro_batch: int) -> Simulation: ...


class Simulator(Protocol):
    """Calls raise SimulationFailed, with what went wrong in the user's terms. It may be called from two threads."""

    def facts(self, device: Device = "cuda", *, ranks: int = 1) -> ModelFacts: ...

    def engine(self, ask: EngineSpec) -> AbstractContextManager[Engine]: ...

    def simulate(self, ask: EngineSpec, micro_batches: Sequence[int]) -> tuple[Simulation, ...]:
        """Each micro batch in turn on one engine."""
        with self.engine(ask) as engine:
            return tuple(engine.measure(micro_batch) for micro_batch in micro_batches)


StartSimulator = Callable[[WorkloadSource], AbstractContextManager[Simulator]]
