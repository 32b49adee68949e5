"""Judge what a rung needs against the limits of a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..types import Tier
from ..units import format_bytes
from .allocator import find_least_limit, replay
from .calibration import Calibration, calibrate_forecast
from .memory_model import RankMemory, compute_rank_memory
from .overheads import Overheads, read_overheads
from .values import (
    EngineSpec,
    ForecastPhase,
    Interval,
    RungForecast,
    Simulation,
    TierForecast,
    Trace,
    Verdict,
)

PHASE_WORDS: dict[ForecastPhase, str] = {
    "init": "building and initialising",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "step": "the optimizer step",
}
_WORTH_SAYING = 0.02  # of the limit


def advise_on_allocator(trace: Trace, *, limit_bytes: int, least_bytes: int, expandable: bool) -> str | None:
    """Half a sentence for a limit of the allocator below the least at which the trace runs well; None: nothing new."""
    if not expandable:
        other, _ = find_least_limit(trace, replay(trace, expandable=True), expandable=True)
        if other <= limit_bytes and least_bytes - other > _WORTH_SAYING * limit_bytes:
            return f"PYTORCH_ALLOC_CONF=expandable_segments:True would save {format_bytes(least_bytes - other)}"
    tried = replay(trace, expandable=expandable, limit_bytes=limit_bytes)
    if tried.ran_out is not None:
        wanted = format_bytes(tried.ran_out.wanted_bytes)
        return f"{PHASE_WORDS[tried.ran_out.phase]} would find no {wanted} in one piece"
    if tried.late_retries:
        return "it would do by giving cached memory back in every step, which is slow"
    return None


_WHERE: Mapping[Tier, str] = {
    "device": "",
    "pinned": " of memory to pin",
    "host": " of host memory a node",
    "nvme": " of NVMe a node",
}


def judge_memory(
    ask: EngineSpec,
    simulated: Simulation,
    *,
    limits: Mapping[Tier, int],
    emulated: bool = False,
    calibration: Calibration | None = None,
    constants: Overheads | None = None,
    expandable: bool = False,
) -> RungForecast:
    """The forecast of one rung at one micro batch.

    cannot_fit: some tier's low end exceeds its limit; tight: a limit lies within the interval; fits: no high end
    exceeds one.

    limits: bytes, where known: device and pinned a rank, host and nvme a node. emulated: the device's limit is a budget
    of torch's allocator on a larger card, as a fit with --gpu-memory sets it, and what lies beside the allocator does
    not count. calibration: None: no trial has been seen.
    """
    rows = constants or read_overheads()
    need = compute_rank_memory(ask, simulated, rows, expandable=expandable)
    ratios = (calibration or calibrate_forecast(ask, (), rows)).ratios(ask.rung)
    inside = need.device.times(ratios)
    device = inside if emulated else inside + need.beside
    memory: dict[Tier, TierForecast] = {
        "device": _predicted(device, limits.get("device")),
        "host": _predicted(_host(ask, need, device), limits.get("host")),
        "pinned": _predicted(need.pinned, limits.get("pinned")),
        "nvme": _predicted(need.nvme, limits.get("nvme")),
    }
    forecast = RungForecast(
        rung=ask.rung,
        verdict="fits",
        reason="",
        micro_batch=simulated.micro_batch,
        memory={tier: held for tier, held in memory.items() if held.high_bytes},
        live_peak_bytes=need.live_bytes,
        by_phase=_by_phase(need, device),
        breakdown=simulated.breakdown,
        assumed=simulated.assumed,
        seconds=simulated.seconds,
    )
    return _said(forecast, _advice(ask, simulated, need, device, limits.get("device"), expandable=expandable))


def judge_tier(held: TierForecast) -> Verdict:
    """What one tier says."""
    if held.limit_bytes is None or held.high_bytes <= held.limit_bytes:
        return "fits"
    return "cannot_fit" if held.low_bytes > held.limit_bytes else "tight"


def find_deciding_tier(memory: Mapping[Tier, TierForecast]) -> Tier:
    """The tier that decides the verdict: the worst one, of equally bad ones the fullest; the device while all fit."""
    order: tuple[Verdict, ...] = ("fits", "tight", "cannot_fit")
    worst = max(memory, key=lambda tier: (order.index(judge_tier(memory[tier])), memory[tier].fill))
    return "device" if judge_tier(memory[worst]) == "fits" and "device" in memory else worst


def _advice(
    ask: EngineSpec, simulated: Simulation, need: RankMemory, device: Interval, limit: int | None, *, expandable: bool
) -> str | None:
    """What the allocator could still do where the limit lies within the interval."""
    trace = simulated.traces.get("device")
    if limit is None or trace is None or ask.device == "cpu" or not device.low_bytes <= limit < device.peak_bytes:
        return None
    left = limit - (device.peak_bytes - need.tensors_bytes)
    return advise_on_allocator(trace, limit_bytes=left, least_bytes=need.tensors_bytes, expandable=expandable)


def _said(forecast: RungForecast, advice: str | None) -> RungForecast:
    """With the verdict, and its reason in a sentence."""
    tier = find_deciding_tier(forecast.memory)
    held = forecast.memory[tier]
    interval = Interval(low_bytes=held.low_bytes, peak_bytes=held.peak_bytes, high_bytes=held.high_bytes)
    limit = "" if held.limit_bytes is None else f" of {format_bytes(held.limit_bytes)}"
    reason = f"needs {interval}{limit}{_WHERE[tier]}"
    if tier == "device" and forecast.decides is not None:
        reason += f"; {PHASE_WORDS[forecast.decides]} decides"
        reason += f"; {advice}" if advice else ""
    return replace(forecast, verdict=judge_tier(held), reason=reason)


def _predicted(held: Interval, limit_bytes: int | None) -> TierForecast:
    return TierForecast(
        peak_bytes=held.peak_bytes, low_bytes=held.low_bytes, high_bytes=held.high_bytes, limit_bytes=limit_bytes
    )


def _host(ask: EngineSpec, need: RankMemory, device: Interval) -> Interval:
    """A node's: of CPU ranks the device is the host's memory."""
    ranks = min(ask.ranks_per_node, ask.world_size)
    return (device if ask.device == "cpu" else need.host).times(ranks)


def _by_phase(need: RankMemory, device: Interval) -> dict[ForecastPhase, int]:
    """What the card must hold in each phase: the largest is the forecast's peak."""
    top = max(need.by_phase.values(), default=0)
    return {phase: device.peak_bytes - (top - held) for phase, held in need.by_phase.items()}
