"""Compute the memory of a rank on each tier: replayed traces, and overheads that no allocator sees."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from ...config.catalogue import parse_capability
from ...config.deepspeed import enabled_half_precision, get_key
from ...devices import DEVICES, find_device
from ...schema import read_toml_as
from ...system.host import data_folder
from ...types import Tier
from ...units import parse_bytes
from ..attention import UNKNOWN_FAMILY
from ..values import STARTING, EngineSpec, ForecastPhase, Interval, Simulation, Trace
from .host_allocators import peak_pinned_bytes, replay_process
from .prices import PriceList, Unpriced
from .replay import Begun, find_least_limit, replay
from .step_time import Schedule, StepClocks

Place = Literal["inside", "outside"]  # of the memory that torch allocates
ShareOf = Literal["tensors", "activations", "reduce_bucket"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """One row: `bytes`, or a `share` of `share_of`, as (low, typical, high) a rank.

    The row counts for engines of this device with at least these ranks and stage, where `setting` is true in
    zero_optimization. `each` names the unit that the bytes are counted for; the first communicator is no further one.
    `least_capability` and `below_capability` bound the card's compute capability, such as "9.0"; an unknown card is a
    Hopper. `nvlink` tells cards with links of their own from those without; unknown cards have them.
    """

    name: str
    tier: Tier
    device: str
    held: Place
    source: str
    least_world_size: int = 1
    least_stage: int = 0
    setting: str | None = None
    bytes: tuple[str, ...] = ()
    share_of: ShareOf = "tensors"
    each: Literal["rank", "module", "further_group", "further_communicator"] = "rank"
    share: tuple[float, ...] = ()
    least_capability: str | None = None
    below_capability: str | None = None
    nvlink: bool | None = None

    def applies_to(self, spec: EngineSpec) -> bool:
        zero = spec.ds_config.get("zero_optimization") or {}
        stage = zero.get("stage", 0)
        if self.device != find_device(spec.device).constants:
            return False
        if spec.world_size < self.least_world_size or stage < self.least_stage:
            return False
        capability = spec.capability or UNKNOWN_FAMILY
        if self.least_capability is not None and capability < parse_capability(self.least_capability):
            return False
        if self.below_capability is not None and capability >= parse_capability(self.below_capability):
            return False
        has_nvlink = spec.machine is None or spec.machine.has_nvlink is not False
        if self.nvlink is not None and self.nvlink != has_nvlink:
            return False
        value = zero.get(self.setting)
        if value is None:  # DeepSpeed overlaps communication at stage 3 only, unless the config says so
            return self.setting is None or (self.setting == "overlap_comm" and stage == 3)
        return bool(value)

    def interval(self, amounts: Mapping[str, int]) -> Interval:
        """Return bytes a rank. `amounts` has the bytes that shares are taken of, and the counts of `each`.

        Raises ValueError for text that is no number of bytes.
        """
        if self.bytes:
            count = 1 if self.each == "rank" else amounts.get(f"{self.each}s", 0)
            low, peak, high = (0 if text == "0" else count * parse_bytes(text) for text in self.bytes)
        else:
            low, peak, high = (int(share * amounts.get(self.share_of, 0)) for share in self.share)
        return Interval(low_bytes=low, peak_bytes=peak, high_bytes=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """The rows, and the certainty of a forecast before any trial, by device.

    `spread` is its relative standard error, and `least` the smallest half-width of its interval.
    """

    spread: Mapping[str, float]
    least: Mapping[str, float]
    constant: tuple[Overhead, ...] = ()

    def sum(self, spec: EngineSpec, tier: Tier, held: Place, amounts: Mapping[str, int]) -> Interval:
        """Return the sum of the rows that count for this engine, in bytes a rank."""
        rows = (row for row in self.constant if row.tier == tier and row.held == held and row.applies_to(spec))
        return sum((row.interval(amounts) for row in rows), Interval())


@cache
def read_overheads(path: Path | None = None) -> Overheads:
    """Read the shipped rows or another file. Raises InputError that says which row is wrong."""
    path = path or data_folder("configs") / "forecast" / "constants.toml"
    hint, refusal = "compare with the shipped file", "does not hold the forecast's constants"
    return read_toml_as(Overheads, path, name="constants", check=_check, hint=hint, refusal=refusal)


def _check(overheads: Overheads) -> None:
    measured = dict.fromkeys(device.constants for device in DEVICES.values())
    for row in overheads.constant:
        if row.device not in measured:
            raise ValueError(f"{row.name!r} is for {row.device!r}, which is none of {', '.join(measured)}")
        for bound in (row.least_capability, row.below_capability):
            if bound is not None:
                parse_capability(bound)
        if bool(row.bytes) == bool(row.share) or len(row.bytes or row.share) != 3:
            raise ValueError(f"{row.name!r} needs three bytes or three shares: low, typical, high")
        interval = row.interval({row.share_of: 10**9})
        if not 0 <= interval.low_bytes <= interval.peak_bytes <= interval.high_bytes:
            raise ValueError(f"{row.name!r}: low, typical and high are not in order")
    for name, table in (("spread", overheads.spread), ("least", overheads.least)):
        if any(not 0 < table.get(device, 0) < 1 for device in measured):
            raise ValueError(f"{name} needs a number between 0 and 1 for each of {', '.join(measured)}")


def estimate_outside_bytes(spec: EngineSpec) -> int:
    """Return the bytes of a card that the CUDA context and the first communicator take beside torch's allocator."""
    return read_overheads().sum(spec, "device", "outside", {}).peak_bytes


_DEFAULT_BUCKET = 500_000_000  # elements, DeepSpeed's reduce_bucket_size
_KEPT_SHARE_OF_CACHE = 0.1  # of the bytes that could be given back but may have to be kept; estimated


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory that one rank needs; for NVMe, the need of a whole node.

    `device` is what torch's allocator holds, or all of a CPU rank's memory.
    `outside_allocator` is what a card holds besides: the CUDA context, NCCL, kernels.
    `host` is pageable and pinned memory, with the peak of loading; `pinned` is the pinned part of it.
    `live_bytes` counts tensors on the device; `tensors_bytes` adds the allocator's rounding and fragments.
    `by_phase` is the peak of `device` in each phase, and `host_by_phase` that of `host`.
    """

    device: Interval
    outside_allocator: Interval
    host: Interval
    pinned: Interval
    nvme: Interval
    live_bytes: int
    tensors_bytes: int
    by_phase: Mapping[ForecastPhase, int]
    host_by_phase: Mapping[ForecastPhase, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CardLimit:
    """The bytes of a card: `ratio` of what torch's allocator should hold, and what lies `beside_allocator`."""

    limit_bytes: int
    ratio: float = 1.0
    beside_allocator: Interval | None = None  # None: as the overheads say

    def bound_allocator(self, outside: Interval, inside: Interval) -> int:
        """Return the largest bytes of tensors and cache that fit."""
        left_bytes = self.limit_bytes - (self.beside_allocator or outside).peak_bytes
        return int(left_bytes / self.ratio) - inside.peak_bytes


def compute_rank_memory(
    spec: EngineSpec, simulation: Simulation, overheads: Overheads, *, expandable: bool, card: CardLimit | None = None
) -> RankMemory:
    """Replay the traces of a simulation on the allocators' models and add the overheads.

    With a `card` the device's peak only tells whether it fits there: how far it is from that is rough, and so are its
    bounds.
    """
    live = {
        tier: {phase: peaks.get(tier, 0) for phase, peaks in simulation.live_bytes.items()}
        for tier in ("device", "host", "pinned")
    }
    live_bytes, live_pinned = (max(live[tier].values(), default=0) for tier in ("device", "pinned"))
    clocks = _make_clocks(spec, simulation)
    bucket = int(get_key(spec.ds_config, "zero_optimization.reduce_bucket_size") or _DEFAULT_BUCKET)
    amounts = {
        "tensors": live_bytes,
        "activations": simulation.breakdown.get("activations", 0),
        # Where clocks tell when blocks come back, the replay's cache has what is freed late.
        "reduce_bucket": 0 if clocks is not None else bucket * (2 if enabled_half_precision(spec.ds_config) else 4),
        "further_groups": simulation.further_groups,
        "modules": simulation.modules,
        "further_communicators": max(0, simulation.communicators - 1),
    }
    inside, outside = (overheads.sum(spec, "device", held, amounts) for held in ("inside", "outside"))
    traced = simulation.traces["device"] if card is not None else _time_returns(simulation, clocks)
    bound_bytes = None if card is None else card.bound_allocator(outside, inside)
    tensors, by_phase = _replay_device(spec, traced, live["device"], expandable=expandable, bound_bytes=bound_bytes)

    trace = simulation.traces.get("pinned")
    peak_pinned = live_pinned if trace is None else max(peak_pinned_bytes(trace), live_pinned)
    # The peaks of pageable and pinned bytes coincide after init, where states only stay. Before that a state is copied
    # from one to the other: at least the larger of the two counts, and at most both. Rounding is kept from the first
    # allocation on.
    both = {phase: size + live["pinned"][phase] for phase, size in live["host"].items()}
    peak_host = max(both.values(), default=0) + peak_pinned - live_pinned
    larger = max(live[tier].get(phase, 0) for tier in ("host", "pinned") for phase in STARTING)
    later = max((size for phase, size in both.items() if phase not in STARTING), default=0)
    host = Interval(low_bytes=min(max(larger, later), peak_host), peak_bytes=peak_host, high_bytes=peak_host)

    nvme_bytes = simulation.nvme_bytes * spec.ranks_of_node
    return RankMemory(
        device=tensors + inside,
        outside_allocator=outside,
        host=host + overheads.sum(spec, "host", "outside", {}),
        pinned=Interval(low_bytes=live_pinned, peak_bytes=peak_pinned, high_bytes=peak_pinned),
        nvme=Interval(low_bytes=nvme_bytes, peak_bytes=nvme_bytes, high_bytes=nvme_bytes),
        live_bytes=live_bytes,
        tensors_bytes=tensors.peak_bytes,
        by_phase={phase: size + inside.peak_bytes for phase, size in by_phase.items()},
        host_by_phase=both,
    )


def _make_clocks(spec: EngineSpec, simulation: Simulation) -> StepClocks | None:
    """Return the machine's clocks, which tell when blocks come back; None where it or the trace does not tell."""
    if spec.machine is None or simulation.schedule is None or not simulation.traces["device"].issued:
        return None
    try:
        return StepClocks(simulation.schedule, PriceList.usual(spec.machine, spec.ranks_of_node))
    except Unpriced:
        return None


def time_returns(spec: EngineSpec, simulation: Simulation) -> Trace:
    """Return the device's trace, with late blocks that come back when the machine's clocks say, where these tell it."""
    return _time_returns(simulation, _make_clocks(spec, simulation))


def _time_returns(simulation: Simulation, clocks: StepClocks | None) -> Trace:
    """Do what `time_returns` does by clocks that are new."""
    trace = simulation.traces["device"]
    if clocks is None or simulation.schedule is None:
        return trace
    return replace(trace, held=_follow_clocks(trace, simulation.schedule, clocks))


def find_returns(trace: Trace, schedule: Schedule, prices: PriceList) -> dict[int, int]:
    """Return blocks of the schedule's step that come back late, as `Trace.held` has them. Raises Unpriced.

    torch records an event on each stream that uses a freed block. It asks for the events at every allocation
    (c10/cuda/CUDACachingAllocator.cpp, `insert_events` and `process_events`). The host asks when its own clock has come
    to the allocation. The event has happened when the stream's clock has passed it.

    Blocks of earlier steps are left out. Memory is reserved there, which keeps the host behind the device. None comes
    back later than `Trace.held` says: the driver's queue does not let the host run ahead any further.
    """
    return _follow_clocks(trace, schedule, StepClocks(schedule, prices))


def _follow_clocks(trace: Trace, schedule: Schedule, clocks: StepClocks) -> dict[int, int]:
    """Run the clocks, which are new, through the schedule; return what `find_returns` does."""
    returns: dict[int, int] = {}
    waiting: list[tuple[float, int]] = []  # when the last of its streams is done with it, and the block

    def pass_on() -> Iterator[int]:
        """Yield the schedule's events; what the trace has before the next one happens at the present clocks."""
        at = next((at for at, issued in enumerate(trace.issued) if issued >= schedule.first), len(trace.events))
        for position, event in enumerate((*schedule.events, None), schedule.first):
            while at < len(trace.events) and trace.issued[at] <= position:
                happen(at)
                at += 1
            if event is not None:
                yield event

    def happen(at: int) -> None:
        event = trace.events[at]
        if event < 0 and (users := trace.users.get(~event)) is not None:
            heapq.heappush(waiting, (max(clocks.streams[stream] for stream in users), ~event))
        while event > 0 and waiting and waiting[0][0] <= clocks.host:
            returns[heapq.heappop(waiting)[1]] = at

    clocks.run(pass_on())
    returns.update((block, len(trace.events)) for _, block in waiting)
    return {block: min(at, trace.held[block]) for block, at in returns.items()}


def _replay_device(
    spec: EngineSpec,
    trace: Trace,
    live: Mapping[ForecastPhase, int],
    *,
    expandable: bool,
    bound_bytes: int | None = None,
) -> tuple[Interval, dict[ForecastPhase, int]]:
    """Return the bytes that the device's allocator holds, and its peak in each phase.

    The peak is the least limit at which the trace runs well: a larger card caches more but does not have to. The low
    end is the allocated bytes. A phase counts at least its live bytes.

    Blocks that another stream holds count as cache: at its limit torch waits for the stream and gives them out.
    """
    if not find_device(spec.device).has_caching_allocator:
        best = replay_process(trace)
        least = unlimited = best.peak_reserved_bytes
    else:
        at_once = replace(trace, held={})
        begun: list[Begun] = []
        first = replay(at_once, expandable=expandable, keep=begun)
        unlimited = first.peak_reserved_bytes
        if trace.held and bound_bytes is None:  # it tells the high end alone
            unlimited = max(unlimited, replay(trace, expandable=expandable).peak_reserved_bytes)
        least, best = find_least_limit(at_once, first, expandable=expandable, bound_bytes=bound_bytes, begun=begun)
    used = {phase: max(size, best.allocated_by_phase.get(phase, 0)) for phase, size in live.items()}
    peak = max([least, *live.values()])
    # The phase with the most in use decides, not the one in which the cache happened to grow.
    share = peak / max([1, *used.values()])
    by_phase = {phase: int(size * share) for phase, size in used.items()}
    low = min(peak, max([best.peak_allocated_bytes, *live.values()]))
    high = peak + int(max(0, unlimited - peak) * _KEPT_SHARE_OF_CACHE)
    return Interval(low_bytes=low, peak_bytes=peak, high_bytes=high), by_phase
