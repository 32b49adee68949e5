"""What one rank's allocators and processes hold for a simulated engine, before any calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..config.deepspeed import enabled_half_precision, get_key
from ..types import Tier
from .allocator import find_least_limit, replay
from .host_allocators import peak_pinned_bytes, replay_process
from .overheads import Overheads
from .values import EngineSpec, ForecastPhase, Interval, Simulation, exact_interval

_DEFAULT_BUCKET = 500_000_000  # elements, DeepSpeed's reduce_bucket_size
_KEPT_SHARE_OF_CACHE = 0.1  # of what could be given back but may have to be kept after all; estimated


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes that a rank needs, and a node of NVMe.

    device: memory that a trial's meter counts.
    beside: memory that the card holds besides.
    host: pageable and pinned memory, with the peak of loading; pinned: of that the pinned part.
    live_bytes: tensors on the device; tensors_bytes: the same with the allocator's rounding and fragments.
    by_phase: the peak of `device` in each phase.
    """

    device: Interval
    beside: Interval
    host: Interval
    pinned: Interval
    nvme: Interval
    live_bytes: int
    tensors_bytes: int
    by_phase: Mapping[ForecastPhase, int]


def compute_rank_memory(
    spec: EngineSpec, simulation: Simulation, overheads: Overheads, *, expandable: bool
) -> RankMemory:
    """Replay the traces of a simulation on the allocators' models and add the overheads."""
    live = _peak_live_bytes(simulation, "device")
    tensors, by_phase = _replay_device(spec, simulation, expandable=expandable)
    amounts = {
        "tensors": live,
        "activations": simulation.breakdown.get("activations", 0),
        "reduce_bucket": _bucket_bytes(spec),
        "expert_groups": simulation.expert_groups,
    }
    inside = overheads.sum(spec, "device", "inside", amounts)
    pinned = _pinned(simulation)
    return RankMemory(
        device=tensors + inside,
        beside=overheads.sum(spec, "device", "outside", amounts),
        host=_host(simulation, pinned) + overheads.sum(spec, "host", "outside", {}),
        pinned=pinned,
        nvme=exact_interval(simulation.nvme_bytes * min(spec.ranks_per_node, spec.world_size)),
        live_bytes=live,
        tensors_bytes=tensors.peak_bytes,
        by_phase={phase: size + inside.peak_bytes for phase, size in by_phase.items()},
    )


def _peak_live_bytes(simulation: Simulation, tier: Tier) -> int:
    return max((peaks.get(tier, 0) for peaks in simulation.live_bytes.values()), default=0)


def _replay_device(
    spec: EngineSpec, simulation: Simulation, *, expandable: bool
) -> tuple[Interval, dict[ForecastPhase, int]]:
    """Return the bytes that the device's allocator holds, and its peak in each phase.

    The peak is the least limit at which the trace runs well: a larger card caches more but does not have to. The low
    end is what is allocated. A trace may lack a phase, because init runs once for several micro batches, so a phase
    counts at least its live bytes.
    """
    live = {phase: peaks.get("device", 0) for phase, peaks in simulation.live_bytes.items()}
    trace = simulation.traces["device"]
    if spec.device == "cpu":
        best = replay_process(trace)
        least = unlimited = best.peak_reserved_bytes
    else:
        first = replay(trace, expandable=expandable)
        unlimited = first.peak_reserved_bytes
        least, best = find_least_limit(trace, first, expandable=expandable)
    used = {phase: max(size, best.allocated_by_phase.get(phase, 0)) for phase, size in live.items()}
    peak = max([least, *live.values()])
    # The phase with the most in use decides, not the one in which the cache happened to grow.
    share = peak / max([1, *used.values()])
    by_phase = {phase: int(size * share) for phase, size in used.items()}
    low = min(peak, max([best.peak_allocated_bytes, *live.values()]))
    high = peak + int(max(0, unlimited - peak) * _KEPT_SHARE_OF_CACHE)
    return Interval(low_bytes=low, peak_bytes=peak, high_bytes=high), by_phase


def _pinned(simulation: Simulation) -> Interval:
    live = _peak_live_bytes(simulation, "pinned")
    trace = simulation.traces.get("pinned")
    peak = live if trace is None else max(peak_pinned_bytes(trace), live)
    return Interval(low_bytes=live, peak_bytes=peak, high_bytes=peak)


def _host(simulation: Simulation, pinned: Interval) -> Interval:
    """Return pageable and pinned bytes together.

    Their peaks coincide after init, where states only stay. In init a state is copied from one to the other: at least
    the larger of the two counts, and at most both.
    """
    rounding = pinned.peak_bytes - pinned.low_bytes  # kept from the first allocation on
    both = {phase: peaks.get("host", 0) + peaks.get("pinned", 0) for phase, peaks in simulation.live_bytes.items()}
    init = simulation.live_bytes.get("init", {})
    larger = max(init.get("host", 0), init.get("pinned", 0))
    later = max((size for phase, size in both.items() if phase != "init"), default=0)
    top = max(both.values(), default=0) + rounding
    return Interval(low_bytes=min(max(larger, later), top), peak_bytes=top, high_bytes=top)


def _bucket_bytes(spec: EngineSpec) -> int:
    elements = get_key(spec.ds_config, "zero_optimization.reduce_bucket_size")
    return int(elements or _DEFAULT_BUCKET) * (2 if enabled_half_precision(spec.ds_config) else 4)
