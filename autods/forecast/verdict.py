"""Judge the memory that a rung needs by the limits of a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..types import Tier
from ..units import format_bytes
from .allocator import find_least_limit, replay
from .calibration import Calibration, calibrate_forecast
from .memory_model import Overheads, RankMemory, compute_rank_memory, read_overheads
from .values import EngineSpec, ForecastPhase, Interval, RungForecast, Simulation, TierForecast, Trace, Verdict

PHASE_WORDS: dict[ForecastPhase, str] = {
    "init": "building and initialising",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "step": "the optimizer step",
}
_WORTH_SAVING = 0.02  # of the limit
_LIMIT_WORDS: Mapping[Tier, str] = {
    "device": "",
    "pinned": " of memory to pin",
    "host": " of host memory a node",
    "nvme": " of NVMe a node",
}


def judge_memory(
    spec: EngineSpec,
    simulation: Simulation,
    *,
    limits: Mapping[Tier, int],
    emulated: bool = False,
    calibration: Calibration | None = None,
    overheads: Overheads | None = None,
    expandable: bool = False,
) -> RungForecast:
    """Return the forecast of one rung at one micro batch, with its verdict.

    A rung cannot fit where the low end of some tier exceeds its limit. It is tight where a limit lies within an
    interval, and fits where no high end exceeds a limit. The arguments are those of `forecast_tiers`.
    """
    overheads = overheads or read_overheads()
    need = compute_rank_memory(spec, simulation, overheads, expandable=expandable)
    device = _device_interval(spec, need, emulated=emulated, calibration=calibration, overheads=overheads)
    memory = _tiers(spec, need, device, limits)
    forecast = RungForecast(
        rung=spec.rung,
        verdict="fits",
        reason="",
        micro_batch=simulation.micro_batch,
        memory=memory,
        live_peak_bytes=need.live_bytes,
        by_phase=_bytes_by_phase(need, device),
        breakdown=simulation.breakdown,
        assumed=simulation.assumed,
        seconds=simulation.seconds,
    )
    advice = _advise(spec, simulation, need, device, limits.get("device"), expandable=expandable)
    tier = find_deciding_tier(memory)
    return replace(forecast, verdict=judge_tier(memory[tier]), reason=_explain(forecast, tier, advice))


def forecast_tiers(
    spec: EngineSpec,
    simulation: Simulation,
    *,
    limits: Mapping[Tier, int],
    emulated: bool = False,
    calibration: Calibration | None = None,
    overheads: Overheads | None = None,
    expandable: bool = False,
) -> dict[Tier, TierForecast]:
    """Return the memory that the engine needs on each tier that it uses.

    `limits` has the bytes of the tiers whose limit is known: device and pinned a rank, host and NVMe a node.
    `emulated` tells that the device's limit is a budget of torch's allocator on a larger card, as --gpu-memory sets it.
    Memory outside the allocator does not count then.
    `calibration` is None before any trial.
    """
    overheads = overheads or read_overheads()
    need = compute_rank_memory(spec, simulation, overheads, expandable=expandable)
    device = _device_interval(spec, need, emulated=emulated, calibration=calibration, overheads=overheads)
    return _tiers(spec, need, device, limits)


def judge_tier(tier: TierForecast) -> Verdict:
    """Return the verdict of one tier."""
    if tier.limit_bytes is None or tier.high_bytes <= tier.limit_bytes:
        return "fits"
    return "cannot_fit" if tier.low_bytes > tier.limit_bytes else "tight"


def find_deciding_tier(memory: Mapping[Tier, TierForecast]) -> Tier:
    """Return the tier with the worst verdict, of several the fullest; the device while all fit."""
    order: tuple[Verdict, ...] = ("fits", "tight", "cannot_fit")
    worst = max(memory, key=lambda tier: (order.index(judge_tier(memory[tier])), memory[tier].fill))
    return "device" if judge_tier(memory[worst]) == "fits" and "device" in memory else worst


def advise_on_allocator(trace: Trace, *, limit_bytes: int, least_bytes: int, expandable: bool) -> str | None:
    """Return half a sentence of advice when the limit is below `least_bytes`, at which the trace runs well."""
    if not expandable:
        other, _ = find_least_limit(trace, replay(trace, expandable=True), expandable=True)
        if other <= limit_bytes and least_bytes - other > _WORTH_SAVING * limit_bytes:
            return f"PYTORCH_ALLOC_CONF=expandable_segments:True would save {format_bytes(least_bytes - other)}"
    limited = replay(trace, expandable=expandable, limit_bytes=limit_bytes)
    if limited.ran_out is not None:
        wanted = format_bytes(limited.ran_out.wanted_bytes)
        return f"{PHASE_WORDS[limited.ran_out.phase]} would find no {wanted} in one piece"
    if limited.late_retries:
        return "it would fit if every step gave cached memory back, which is slow"
    return None


def _device_interval(
    spec: EngineSpec, need: RankMemory, *, emulated: bool, calibration: Calibration | None, overheads: Overheads
) -> Interval:
    calibration = calibration or calibrate_forecast(spec, (), overheads)
    inside = need.device.times(calibration.ratios(spec.rung))
    return inside if emulated else inside + need.outside_allocator


def _tiers(
    spec: EngineSpec, need: RankMemory, device: Interval, limits: Mapping[Tier, int]
) -> dict[Tier, TierForecast]:
    ranks = min(spec.ranks_per_node, spec.world_size)
    # The device of a CPU rank is the node's memory.
    host = (device if spec.device == "cpu" else need.host).times(ranks)
    intervals: dict[Tier, Interval] = {"device": device, "host": host, "pinned": need.pinned, "nvme": need.nvme}
    return {
        tier: TierForecast(
            peak_bytes=interval.peak_bytes,
            low_bytes=interval.low_bytes,
            high_bytes=interval.high_bytes,
            limit_bytes=limits.get(tier),
        )
        for tier, interval in intervals.items()
        if interval.high_bytes
    }


def _advise(
    spec: EngineSpec,
    simulation: Simulation,
    need: RankMemory,
    device: Interval,
    limit_bytes: int | None,
    *,
    expandable: bool,
) -> str | None:
    """Return advice where the limit lies in the lower half of the interval."""
    if limit_bytes is None or spec.device == "cpu" or not device.low_bytes <= limit_bytes < device.peak_bytes:
        return None
    left = limit_bytes - (device.peak_bytes - need.tensors_bytes)
    trace = simulation.traces["device"]
    return advise_on_allocator(trace, limit_bytes=left, least_bytes=need.tensors_bytes, expandable=expandable)


def _explain(forecast: RungForecast, tier: Tier, advice: str | None) -> str:
    """Return the reason of the verdict in a sentence."""
    needs = forecast.memory[tier]
    interval = Interval(low_bytes=needs.low_bytes, peak_bytes=needs.peak_bytes, high_bytes=needs.high_bytes)
    limit = "" if needs.limit_bytes is None else f" of {format_bytes(needs.limit_bytes)}"
    reason = f"needs {interval}{limit}{_LIMIT_WORDS[tier]}"
    if tier == "device" and forecast.decides is not None:
        reason += f"; {PHASE_WORDS[forecast.decides]} decides"
        reason += f"; {advice}" if advice else ""
    return reason


def _bytes_by_phase(need: RankMemory, device: Interval) -> dict[ForecastPhase, int]:
    """Return the bytes that the card must hold in each phase; the largest is the forecast's peak."""
    top = max(need.by_phase.values(), default=0)
    return {phase: device.peak_bytes - (top - held) for phase, held in need.by_phase.items()}
