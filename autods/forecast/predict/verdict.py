"""Judge a rung on a machine: the memory that it needs by the limits, and its speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial

from ...config.checkpointing import offloads_inputs
from ...devices import find_device
from ...devices.base import EXPANDABLE
from ...types import Tier
from ...units import format_bytes
from ..values import (
    STARTING,
    EngineSpec,
    ForecastPhase,
    Interval,
    RungForecast,
    Simulation,
    TierForecast,
    Trace,
    Verdict,
)
from .calibration import Calibration, calibrate_forecast
from .memory_model import CardLimit, Overheads, compute_rank_memory, read_overheads, time_returns
from .prices import PriceList, Unpriced, read_constants
from .replay import Replay, repeat_last_step, replay
from .step_time import Speed, forecast_step

_PHASE_WORDS: dict[ForecastPhase, str] = {
    "build": "building the model",
    "init": "initialising the engine",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "step": "the optimizer step",
}
_LIMIT_WORDS: Mapping[Tier, str] = {
    "device": "",
    "pinned": " of memory to pin",
    "host": " of host memory a node",
    "nvme": " of NVMe a node",
}
_STATES = ("parameters", "gradients", "optimizer")
_WORTH_SAVING = 0.02  # of the limit


def judge_memory(
    spec: EngineSpec,
    simulation: Simulation,
    *,
    limits: Mapping[Tier, int],
    calibration: Calibration | None = None,
    overheads: Overheads | None = None,
    expandable: bool | None = False,
    advise: bool = True,
    roughly: bool = False,
) -> RungForecast:
    """Return the forecast of one rung at one micro batch, with its verdict.

    With `expandable` torch's allocator grows its segments. None: it does so where the device may lack memory without
    it, may run well within the limit with it, and fits by that or needs clearly less.

    A rung cannot fit where the low end of some tier exceeds its limit. It is tight where a limit lies within an
    interval, and fits where no high end exceeds a limit. The low end of an upper bound holds no activations.

    `limits` has the bytes of the tiers whose limit is known: device and pinned a rank, host and NVMe a node.
    `calibration` is None before any trial.
    `advise` adds to the reason of a tight fit how the allocator would fail, which takes a further replay.
    `roughly` leaves of the device only whether its peak is within the limit, in a third of the time.
    """
    overheads = overheads or read_overheads()
    calibration = calibration or calibrate_forecast(spec, (), overheads)
    judge = partial(_judge, spec, simulation, limits, calibration, overheads, advise=advise, roughly=roughly)
    forecast = judge(expandable=bool(expandable))
    if expandable is not None or not find_device(spec.device).has_caching_allocator:
        return forecast
    device, limit = forecast.memory.get("device"), limits.get("device")
    if device is None or limit is None:
        return forecast
    if not device.low_bytes <= limit < (device.peak_bytes if roughly else device.high_bytes):
        return forecast
    trace = repeat_last_step(simulation.traces["device"])
    left_bytes = limit - max(0, device.low_bytes - forecast.live_peak_bytes)  # at most, of what lies beside
    if not replay(trace, expandable=True, limit_bytes=left_bytes, only_if_well=True).runs_well:
        return forecast  # one replay tells it, and the forecast with them takes a dozen
    grown = judge(expandable=True)
    peak_bytes = grown.memory["device"].peak_bytes
    fits_so_alone = peak_bytes <= limit < device.peak_bytes
    return grown if fits_so_alone or device.peak_bytes - peak_bytes > _WORTH_SAVING * limit else forecast


def _judge(
    spec: EngineSpec,
    simulation: Simulation,
    limits: Mapping[Tier, int],
    calibration: Calibration,
    overheads: Overheads,
    *,
    expandable: bool,
    advise: bool,
    roughly: bool,
) -> RungForecast:
    ratios, card = calibration.ratios(spec.rung), None
    if roughly and (limit := limits.get("device")) is not None:
        card = CardLimit(limit_bytes=limit, ratio=ratios.middle, beside_allocator=calibration.outside_allocator)
    need = compute_rank_memory(spec, simulation, overheads, expandable=expandable, card=card)
    device = need.device.times(ratios) + (calibration.outside_allocator or need.outside_allocator)
    if simulation.is_upper_bound:  # sure are the states at the peak, and what building takes
        states_bytes = sum(simulation.breakdown.get(kind, 0) for kind in _STATES)
        built_bytes = max(simulation.live_bytes.get(phase, {}).get("device", 0) for phase in STARTING)
        device = replace(device, low_bytes=min(device.low_bytes, max(states_bytes, built_bytes)))
    kind = find_device(spec.device)
    host = device if kind.shares_host_memory else need.host
    intervals: dict[Tier, Interval] = {
        "device": device, "host": host.times(spec.ranks_of_node), "pinned": need.pinned, "nvme": need.nvme,
    }  # fmt: skip
    memory = {
        tier: TierForecast(**asdict(interval), limit_bytes=limits.get(tier))
        for tier, interval in intervals.items()
        if interval.high_bytes
    }
    offloads = bool(spec.checkpointing) and offloads_inputs(spec.ds_config)
    by_phase = _raise_to_peak(need.by_phase, device.peak_bytes)
    host_by_phase = by_phase if kind.shares_host_memory else _raise_to_peak(need.host_by_phase, host.peak_bytes)

    tier = find_deciding_tier(memory)
    limit = memory[tier].limit_bytes
    reason = f"needs {memory[tier]}{'' if limit is None else f' of {format_bytes(limit)}'}{_LIMIT_WORDS[tier]}"
    if tier == "device" and by_phase:
        reason += f"; {_PHASE_WORDS[max(by_phase, key=by_phase.__getitem__)]} decides"
        reason += f", with {EXPANDABLE}" if expandable else ""
        reason += ", with layers' inputs on the host" if offloads else ""
        in_lower_half = limit is not None and device.low_bytes <= limit < device.peak_bytes
        if advise and limit is not None and in_lower_half and kind.has_caching_allocator:
            left_bytes = limit - (device.peak_bytes - need.tensors_bytes)
            reason += _describe_shortage(simulation.traces["device"], left_bytes, expandable)
    return RungForecast(
        rung=spec.rung,
        verdict=judge_tier(memory[tier]),
        reason=reason,
        micro_batch=simulation.micro_batch,
        memory=memory,
        live_peak_bytes=need.live_bytes,
        overhead_bytes=device.peak_bytes - need.tensors_bytes,
        by_phase=by_phase,
        host_by_phase={phase: spec.ranks_of_node * size for phase, size in host_by_phase.items()},
        breakdown=simulation.breakdown,
        expandable=expandable,
        offloads_inputs=offloads,
        assumed=simulation.assumed,
        seconds=simulation.seconds,
    )


def _raise_to_peak(by_phase: Mapping[ForecastPhase, int], peak_bytes: int) -> dict[ForecastPhase, int]:
    """Return the phases' bytes, with what the peak has beside the largest of them in each."""
    beside_bytes = peak_bytes - max(by_phase.values(), default=0)
    return {phase: size + beside_bytes for phase, size in by_phase.items()}


def forecast_speed(
    spec: EngineSpec,
    simulation: Simulation,
    *,
    accumulation: int,
    tokens_per_sample: int | None = None,
    replicas: int | None = None,
    returned: int = 0,
) -> Speed | None:
    """Return the speed of the engine's step on its machine, with the shipped constants.

    `replicas` is by how many ranks the samples multiply; None: all of them. `returned` is as in `forecast_step`.
    Returns None where the engine logs no work, as on CPU ranks, and where the machine's file lacks a rate that the step
    needs.
    """
    if spec.machine is None or simulation.schedule is None:
        return None
    constants = read_constants()
    prices = PriceList.usual(spec.machine, spec.ranks_of_node)
    try:
        step = forecast_step(simulation.schedule, prices, constants, accumulation=accumulation, returned=returned)
    except Unpriced:
        return None
    if simulation.is_upper_bound:
        step = replace(step, low_seconds=0.0)
    rate = simulation.micro_batch * accumulation * (replicas or spec.world_size) / step.seconds
    return Speed(
        step=step,
        micro_batch=simulation.micro_batch,
        accumulation=accumulation,
        samples_per_second=rate,
        tokens_per_second=None if tokens_per_sample is None else rate * tokens_per_sample,
    )


def replay_at_limit(spec: EngineSpec, simulation: Simulation, forecast: RungForecast) -> Replay | None:
    """Return the replay of a GPU's trace at the device's limit; None where no limit is known or nothing is left of it.

    It has three optimizer steps, where the trace has two alike. The forecast is that of the simulation.
    """
    limit_bytes = forecast.memory["device"].limit_bytes if "device" in forecast.memory else None
    if limit_bytes is None or (left_bytes := limit_bytes - forecast.overhead_bytes) <= 0:
        return None
    trace = repeat_last_step(time_returns(spec, simulation))
    return replay(trace, expandable=forecast.expandable, limit_bytes=left_bytes)


def may_fit_offloaded(forecast: RungForecast | None) -> bool:
    """Return whether a rung that should not fit may do so with the inputs of its layers on the host.

    It must lack memory of the device alone, in forward or backward alone, and no more than activations take there.
    """
    if forecast is None or forecast.offloads_inputs:
        return False
    if {tier for tier, held in forecast.memory.items() if held.fill > 1} != {"device"}:
        return False
    device = forecast.memory["device"]
    limit_bytes = device.limit_bytes or 0
    others_bytes = max((size for phase, size in forecast.by_phase.items() if phase in (*STARTING, "step")), default=0)
    lacking_bytes = device.peak_bytes - limit_bytes
    return others_bytes <= limit_bytes and lacking_bytes <= forecast.breakdown.get("activations", 0)


def is_surer(forecast: RungForecast, other: RungForecast) -> bool:
    """Return whether a rung fits more surely by one forecast than by the other."""
    order: tuple[Verdict, ...] = ("not_applicable", "cannot_fit", "tight", "fits")
    ranks = [(order.index(each.verdict), each.fill <= 1) for each in (forecast, other)]
    return ranks[0] > ranks[1]


def find_tier_short_at_build(forecast: RungForecast, device: str) -> Tier | None:
    """Return the tier that a rung lacks while it builds and initializes, and not after that; None without one.

    The host counts where the device is not short later.
    """
    short = {tier for tier, held in forecast.memory.items() if judge_tier(held) != "fits"}
    if not short or short - {"device", "host"}:
        return None
    if "device" in short:
        later_bytes = max((size for phase, size in forecast.by_phase.items() if phase not in STARTING), default=0)
        if later_bytes > (forecast.memory["device"].limit_bytes or 0):
            return None
    return "host" if "host" in short or find_device(device).shares_host_memory else "device"


def judge_tier(tier: TierForecast) -> Verdict:
    if tier.limit_bytes is None or tier.high_bytes <= tier.limit_bytes:
        return "fits"
    return "cannot_fit" if tier.low_bytes > tier.limit_bytes else "tight"


def find_deciding_tier(memory: Mapping[Tier, TierForecast]) -> Tier:
    """Return the tier with the worst verdict, of several the fullest; the device while all fit."""
    order: tuple[Verdict, ...] = ("fits", "tight", "cannot_fit")
    worst = max(memory, key=lambda tier: (order.index(judge_tier(memory[tier])), memory[tier].fill))
    return "device" if judge_tier(memory[worst]) == "fits" and "device" in memory else worst


def _describe_shortage(trace: Trace, limit_bytes: int, expandable: bool) -> str:
    """Return a clause for a limit below that at which the trace runs well; "" where there is nothing to say."""
    limited = replay(repeat_last_step(trace), expandable=expandable, limit_bytes=limit_bytes)
    if limited.ran_out is not None:
        wanted = format_bytes(limited.ran_out.wanted_bytes)
        return f"; {_PHASE_WORDS[limited.ran_out.phase]} would find no {wanted} in one piece"
    return "; it would fit if every step gave cached memory back, which is slow" if limited.late_retries else ""
