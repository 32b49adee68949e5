"""What one rank's allocators and processes hold for what a simulated engine allocated, before any calibration."""

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
_OF_WHAT_IS_CACHED = 0.1  # how much of what could be given back may have to be kept after all; estimated


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes. device: what a trial's measure counts, a rank; beside: what the card holds besides, a rank.

    host: pageable and pinned of a rank, the loading peak included; pinned of that alone. nvme: of a node.
    live_bytes: tensors on the device alone; tensors_bytes: with what the allocator adds. by_phase: the middle of
    `device`.
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
    ask: EngineSpec, simulated: Simulation, constants: Overheads, *, expandable: bool
) -> RankMemory:
    """What a rank needs."""
    live = _live(simulated, "device")
    tensors, by_phase = _tensors(ask, simulated, expandable=expandable)
    shares = {
        "tensors": live,
        "activations": simulated.breakdown.get("activations", 0),
        "reduce_bucket": _bucket_bytes(ask),
        "expert_groups": simulated.expert_groups,
    }
    own = constants.of(ask, "device", "inside", shares)
    pinned = _pinned(simulated)
    return RankMemory(
        device=tensors + own,
        beside=constants.of(ask, "device", "outside", shares),
        host=_host(simulated, pinned) + constants.of(ask, "host", "outside", {}),
        pinned=pinned,
        nvme=exact_interval(simulated.nvme_bytes * min(ask.ranks_per_node, ask.world_size)),
        live_bytes=live,
        tensors_bytes=tensors.peak_bytes,
        by_phase={phase: held + own.peak_bytes for phase, held in by_phase.items()},
    )


def _live(simulated: Simulation, tier: Tier) -> int:
    return max((peaks.get(tier, 0) for peaks in simulated.live_bytes.values()), default=0)


def _tensors(ask: EngineSpec, simulated: Simulation, *, expandable: bool) -> tuple[Interval, dict[ForecastPhase, int]]:
    """The allocator's bytes, and its peak by phase.

    The middle is the least limit at which it runs well (`find_least_limit`): a larger card caches more, but does not
    have to. The low end is what is allocated. A trace need not hold every phase (init is run once for several micro
    batches), so a phase counts at least its live bytes.
    """
    live = {phase: peaks.get("device", 0) for phase, peaks in simulated.live_bytes.items()}
    trace = simulated.traces["device"]
    if ask.device == "cpu":
        held = replay_process(trace)
        least = roomy = held.peak_reserved_bytes
    else:
        held = replay(trace, expandable=expandable)
        roomy = held.peak_reserved_bytes
        least, held = find_least_limit(trace, held, expandable=expandable)
    blocks = {phase: max(size, held.allocated_by_phase.get(phase, 0)) for phase, size in live.items()}
    peak = max([least, *live.values()])
    # The phase with the most in use decides, not the one in which the cache happened to grow.
    share = peak / max([1, *blocks.values()])
    by_phase = {phase: int(size * share) for phase, size in blocks.items()}
    low = min(peak, max([held.peak_allocated_bytes, *live.values()]))
    high = peak + int(max(0, roomy - peak) * _OF_WHAT_IS_CACHED)
    return Interval(low_bytes=low, peak_bytes=peak, high_bytes=high), by_phase


def _pinned(simulated: Simulation) -> Interval:
    """Page-locked bytes of a rank."""
    live = _live(simulated, "pinned")
    if (trace := simulated.traces.get("pinned")) is None:
        return exact_interval(live)
    held = max(peak_pinned_bytes(trace), live)
    return Interval(low_bytes=live, peak_bytes=held, high_bytes=held)


def _host(simulated: Simulation, pinned: Interval) -> Interval:
    """Pageable and pinned together, of a rank. Their peaks coincide after init, where states only stay.

    In init a state is copied from one to the other, so that at least the larger of the two, and at most both count.
    """
    extra = pinned.peak_bytes - pinned.low_bytes  # rounding: kept from the first allocation on
    both = {phase: peaks.get("host", 0) + peaks.get("pinned", 0) for phase, peaks in simulated.live_bytes.items()}
    init = simulated.live_bytes.get("init", {})
    one = max(init.get("host", 0), init.get("pinned", 0))
    later = max((size for phase, size in both.items() if phase != "init"), default=0)
    top = max(both.values(), default=0) + extra
    return Interval(low_bytes=min(max(one, later), top), peak_bytes=top, high_bytes=top)


def _bucket_bytes(ask: EngineSpec) -> int:
    elements = get_key(ask.ds_config, "zero_optimization.reduce_bucket_size")
    return int(elements or _DEFAULT_BUCKET) * (2 if enabled_half_precision(ask.ds_config) else 4)
