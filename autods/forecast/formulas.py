"""What each rung allocates, by formula: an estimate for where the simulated engine cannot be had.

P parameters, W ranks, S = P/W a shard, R the reduce bucket, L the largest parameter, in elements; b bytes of the
model's dtype. Read in DeepSpeed's sources (0.19: `stage_1_and_2.py`, `stage3.py`, `fp16/fused_optimizer.py`) and
compared with its engine run as rank 0 of 8. What is moved to the CPU or NVMe is read off the config, so that any rung
works. Activations are the caller's: they depend on the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config.deepspeed import get, half_precision
from ..types import ModelFacts, Tier
from .overheads import overlaps
from .values import Ask, ForecastPhase, Simulated

ASSUMED = "the formulas' estimate: the engine was not simulated"
# fp32 values that an optimizer keeps of each parameter; Adam and whatever is not known: two moments.
_MOMENTS = {"sgd": 0, "lion": 1, "fusedlion": 1, "adagrad": 1, "muon": 1}
_MOMENTUM = "optimizer.params.momentum"  # with which SGD keeps one
_SWAP_BUFFERS = 4  # DeepSpeed's offload_optimizer.buffer_count
_PARAMETER_BUFFERS = 5  # offload_param.buffer_count
_PARAMETER_BUFFER = 100_000_000  # offload_param.buffer_size, elements


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine:
    """The config's numbers, in elements and bytes."""

    stage: int
    parameters: int
    shard: int
    largest: int
    dtype_bytes: int
    moments_bytes: int  # of a parameter
    bucket: int
    buckets: int  # two if communication overlaps the backward pass
    gathered: int
    whole_bytes: int  # stage 3: of the model before it is split; 0 under zero.Init
    sub_group: int
    accumulates: bool
    world_size: int
    torch_adam: bool
    optimizer_on: Tier
    parameters_on: Tier
    swap_buffers: int
    parameter_buffers: int


def estimated(ask: Ask, facts: ModelFacts, *, micro_batch: int, activation_bytes: int) -> Simulated:
    """Peaks by phase and tier, without traces; `assumed` says that they are estimates.

    activation_bytes: the most that activations hold at once at this micro batch.
    """
    engine = _read(ask, facts)
    device, breakdown = _DEVICE[engine.stage](engine, activation_bytes)
    host, pinned = _host(engine)
    live: dict[ForecastPhase, Mapping[Tier, int]] = {
        phase: {"device": size, "host": host, "pinned": pinned} for phase, size in device.items()
    }
    return Simulated(
        micro_batch=micro_batch,
        live_bytes=live,
        traces={},
        nvme_bytes=_nvme(engine),
        breakdown=breakdown,
        assumed=(ASSUMED,),
    )


def _read(ask: Ask, facts: ModelFacts) -> _Engine:
    config = ask.ds_config

    def zero(key: str, default: Any) -> Any:
        found = get(config, f"zero_optimization.{key}")
        return default if found is None else found

    dtype_bytes = 2 if half_precision(config) else 4
    optimizer = str(get(config, "optimizer.type") or "adamw").lower()
    live = min(int(zero("stage3_max_live_parameters", 1e9)), int(zero("stage3_max_reuse_distance", 1e9)))
    return _Engine(
        stage=int(zero("stage", 0)),
        parameters=facts.parameters,
        shard=-(-facts.parameters // ask.world_size),
        largest=facts.largest_parameter,
        dtype_bytes=dtype_bytes,
        moments_bytes=4 * (1 if optimizer == "sgd" and get(config, _MOMENTUM) else _MOMENTS.get(optimizer, 2)),
        bucket=int(zero("reduce_bucket_size", 5e8)),
        buckets=2 if overlaps(ask) else 1,
        gathered=min(facts.parameters, max(live, facts.largest_parameter)),
        whole_bytes=0 if ask.zero_init else dtype_bytes * facts.parameters,
        sub_group=int(zero("sub_group_size", 1e9)),
        accumulates=int(config.get("gradient_accumulation_steps") or 1) > 1,
        world_size=ask.world_size,
        torch_adam=bool(get(config, "optimizer.params.torch_adam")) or not config.get("optimizer"),
        optimizer_on=_TIERS.get(str(zero("offload_optimizer.device", "none")), "device"),
        parameters_on=_TIERS.get(str(zero("offload_param.device", "none")), "device"),
        swap_buffers=int(zero("offload_optimizer.buffer_count", _SWAP_BUFFERS)),
        parameter_buffers=int(zero("offload_param.buffer_count", _PARAMETER_BUFFERS))
        * int(zero("offload_param.buffer_size", _PARAMETER_BUFFER)),
    )


_TIERS: Mapping[str, Tier] = {"cpu": "host", "nvme": "nvme"}
_Found = tuple[dict[ForecastPhase, int], dict[str, int]]


def _replicated(engine: _Engine, activations: int) -> _Found:
    """Stage 0. In half precision the optimizer keeps an fp32 copy, and makes it out of a second half one."""
    p, b = engine.parameters, engine.dtype_bytes
    if b == 4:
        kept, init, step = 4 * p, 4 * p, 8 * p  # torch's fused steps work on lists: gradients and one copy
    else:
        kept, init = 6 * p, 18 * p
        step = 7 * p if engine.torch_adam else 10 * p  # gradients in b, then an fp32 list of them, then a flat one
    states = engine.moments_bytes * p
    rest = kept + states
    peaks: dict[ForecastPhase, int] = {
        "init": init,
        "forward": rest + activations,
        "backward": rest + b * p + activations,
        "step": rest + step,
    }
    return peaks, _breakdown(b * p, b * p, kept - b * p + states, activations, 0, peaks)


def _partitioned(engine: _Engine, activations: int) -> _Found:
    """Stages 1 and 2: whole parameters, a shard of the optimizer, gradients whole (1) or reduced as they come (2)."""
    p, s, b, bucket = engine.parameters, engine.shard, engine.dtype_bytes, engine.dtype_bytes * engine.bucket
    offloaded = engine.optimizer_on != "device"
    flat = 2 * b * p  # a second copy for a moment, while the parameters are laid out flat
    buckets = bucket * engine.buckets
    transient = 0 if engine.world_size == 1 else bucket
    if offloaded:
        states, own = 0, 2 * engine.largest
        backward = buckets + transient + 8 * engine.largest  # the norm is taken in fp64
        step = 0
    else:
        states = (4 + engine.moments_bytes) * s
        own = 0
        kept = b * s * (2 if engine.accumulates and engine.stage == 2 else 1)
        backward = max(buckets + transient, kept) if engine.stage == 1 else buckets + transient + kept
        step = b * s + max(6 * s, 8 * min(engine.largest, s))
    gradients = b * p if engine.stage == 1 else 0
    rest = b * p + own + states
    peaks: dict[ForecastPhase, int] = {
        "init": max(flat, rest - (0 if offloaded else engine.moments_bytes * s)),
        "forward": rest + activations,
        # Either most activations are still there, or most gradients already.
        "backward": rest + max(activations + buckets + transient, gradients + backward + activations // 2),
        "step": rest + step,
    }
    return peaks, _breakdown(b * p, gradients or b * s, states, activations, buckets, peaks)


def _fully_sharded(engine: _Engine, activations: int) -> _Found:
    """Stage 3. Gathered parameters stay as long as the live and reuse limits allow."""
    s, b, bucket = engine.shard, engine.dtype_bytes, engine.dtype_bytes * engine.bucket
    parameters = b * s if engine.parameters_on == "device" else 0
    on_device = engine.optimizer_on == "device"
    states = (4 + engine.moments_bytes) * s if on_device else 0
    gradients = b * s if on_device else 0
    gathered = b * engine.gathered
    rest = parameters + states + gradients + bucket
    peaks: dict[ForecastPhase, int] = {
        # Without zero.Init the whole model is moved to the device before it is split.
        "init": max(parameters + (8 * s if on_device else bucket + b * engine.largest), engine.whole_bytes),
        "forward": rest + gathered + activations,
        "backward": rest + gathered + activations + b * max(engine.bucket, engine.largest),
        "step": rest + (6 * min(s, engine.sub_group) if on_device else 0),
    }
    return peaks, _breakdown(parameters + gathered, gradients, states, activations, 2 * bucket, peaks)


_DEVICE = {0: _replicated, 1: _partitioned, 2: _partitioned, 3: _fully_sharded}


def _breakdown(
    parameters: int,
    gradients: int,
    optimizer: int,
    activations: int,
    buckets: int,
    peaks: Mapping[ForecastPhase, int],
) -> dict[str, int]:
    """At the peak: states are always there, activations not in init and step; what is left is other."""
    top = max(peaks, key=lambda phase: peaks[phase])
    found = {"parameters": parameters, "optimizer": optimizer}
    if top in ("backward", "step"):
        found["gradients"] = gradients
    if top in ("forward", "backward"):
        found |= {"activations": activations, "buckets": buckets if top == "backward" else 0}
    left = peaks[top]
    for name, size in found.items():
        found[name] = min(size, left)
        left -= found[name]
    return found | {"other": left}


def _host(engine: _Engine) -> tuple[int, int]:
    """Pageable and pinned bytes of a rank between steps."""
    s, b = engine.shard, engine.dtype_bytes
    pageable = pinned = 0
    if engine.optimizer_on == "host":
        more = b * s if engine.accumulates and engine.stage < 3 else 0
        if engine.stage < 3:
            pageable += engine.moments_bytes * s
            pinned += (4 + 4 + b) * s + 2 * engine.largest + more  # master, gradients, a copy to send back
        else:
            pageable += (4 + engine.moments_bytes) * s
            pinned += (4 + b) * s
    elif engine.optimizer_on == "nvme":
        pinned += 4 * engine.swap_buffers * min(s, engine.sub_group) + 4 * s
    if engine.parameters_on == "host":
        pinned += b * s
    elif engine.parameters_on == "nvme":
        pinned += b * engine.parameter_buffers
    return pageable, pinned


def _nvme(engine: _Engine) -> int:
    """Swap files of a rank: master, moments and gradients of a shard, and its parameters."""
    s = engine.shard
    optimizer = (4 + engine.moments_bytes + 4) * s if engine.optimizer_on == "nvme" else 0
    return optimizer + (engine.dtype_bytes * s if engine.parameters_on == "nvme" else 0)
