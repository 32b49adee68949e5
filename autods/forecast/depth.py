"""A deep model's forecast from two shallow ones: an estimate, for the first table.

Most large models repeat one layer. What lives in a phase grows by the same bytes with each, once the model is larger
than what DeepSpeed limits: its buckets, and the parameters that stage 3 keeps gathered. So two depths beyond those
limits give a line. It is not exact: where in a layer a bucket is full decides some bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from ..config.deepspeed import get
from ..types import ModelFacts, Tier
from .allocator import phases
from .memory_model import Need, need_of
from .overheads import Constants
from .values import Ask, ForecastPhase, Interval, Ratios, Simulated, Trace

_Key = TypeVar("_Key")
_APART = 2  # layers between the two depths
_WORTH = 0.5  # of the full depth: two depths that cost more than that together save no time
_LIMITS = {  # number of parameters that DeepSpeed keeps at a time, and its default
    "zero_optimization.reduce_bucket_size": 500_000_000,
    "zero_optimization.stage3_max_live_parameters": 1_000_000_000,
    "zero_optimization.stage3_max_reuse_distance": 1_000_000_000,
}
_LEAST_PARAMETERS = 4_000_000_000  # smaller models take seconds, and their buckets lose the allocator up to a fifth
_SHOWS = 1 / 32  # of the parameters: a smaller share of a rank has parts that no estimate has to tell
_NEAR = 0.001  # of what is held: so little stays where all is gone
_WIDER = 0.03  # of what was added, on both sides of the interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Depths:
    """Layers of the two shallow models and of the whole one."""

    shallow: int
    deeper: int
    whole: int

    def line(self, shallow: float, deeper: float) -> int:
        """The line through the two depths, at the whole one."""
        slope = (deeper - shallow) / (self.deeper - self.shallow)
        return max(0, round(deeper + slope * (self.whole - self.deeper)))


def depths_for(ask: Ask, facts: ModelFacts) -> Depths | None:
    """Where to look; None when it saves nothing, the model is small, or it has no layers that repeat."""
    if not facts.layers or not facts.layer_parameters or facts.parameters < _LEAST_PARAMETERS:
        return None
    stage = get(ask.ds_config, "zero_optimization.stage")
    limits = [
        float(get(ask.ds_config, key) or default)
        for key, default in _LIMITS.items()
        if stage == 3 or "stage3" not in key
    ]
    shallow = math.ceil(max(limits) / facts.layer_parameters) + 1
    if stage in (1, 2):
        shallow = max(shallow, math.ceil(_for_two_parameters(ask.world_size, facts) / facts.layer_parameters))
    depths = Depths(shallow=shallow, deeper=shallow + _APART, whole=facts.layers)
    return depths if depths.shallow + depths.deeper <= _WORTH * depths.whole else None


def _for_two_parameters(world_size: int, facts: ModelFacts) -> float:
    """Parameters in layers until a rank's share is more than one tensor, if that of the whole model is.

    Stages 1 and 2 copy the gradients of their share into one tensor, but for a share that lies in one.
    """
    share = facts.parameters / world_size
    if not facts.largest_parameter < share > _SHOWS * facts.parameters:
        return 0.0
    rest = facts.parameters - facts.layers * facts.layer_parameters
    return facts.largest_parameter * world_size - rest


def has_room_to_flatten(ask: Ask, facts: ModelFacts) -> bool:
    """Whether the whole model, like a shallow one, is flattened on the device.

    Stages 1 and 2 do so if a copy of the parameters fits beside them, else on the host (`stage_1_and_2.py`). Shallow
    models that are flattened on the host by force grow by other bytes than the whole one: up to 7 % too little.
    """
    if get(ask.ds_config, "zero_optimization.stage") not in (1, 2) or ask.device != "cuda":
        return True
    half = any(get(ask.ds_config, f"{kind}.enabled") for kind in ("bf16", "fp16"))
    return 2 * facts.parameters * (2 if half else 4) <= ask.device_bytes


def deepened(ask: Ask, shallow: Simulated, deeper: Simulated, depths: Depths) -> Simulated:
    """What the whole model would allocate, by the line through the two; without traces."""
    live: dict[ForecastPhase, Mapping[Tier, int]] = {
        phase: _lines(depths, shallow.live_bytes[phase], tiers) for phase, tiers in deeper.live_bytes.items()
    }
    for phase, peak in _highest(depths, shallow, deeper).items():
        live[phase] = {**live[phase], "device": max(peak, live[phase].get("device", 0))}
    said = f"{ask.rung}: an estimate, by the line through {depths.shallow} and {depths.deeper} of {depths.whole} layers"
    return replace(
        deeper,
        live_bytes=live,
        traces={},
        nvme_bytes=depths.line(shallow.nvme_bytes, deeper.nvme_bytes),
        expert_groups=deeper.expert_groups,
        optimizer_elements=depths.line(shallow.optimizer_elements, deeper.optimizer_elements),
        summed_peak_bytes=_lines(depths, shallow.summed_peak_bytes, deeper.summed_peak_bytes),
        breakdown=_lines(depths, shallow.breakdown, deeper.breakdown),
        assumed=(*deeper.assumed, said),
        seconds=shallow.seconds + deeper.seconds,
    )


def need_of_deepened(
    ask: Ask, whole: Simulated, deeper: Simulated, constants: Constants, *, expandable: bool = False
) -> Need:
    """What a rank needs for the whole model: what the allocators add is taken from the deeper of the two."""
    known = need_of(ask, deeper, constants, expandable=expandable)
    decides = max(whole.live_bytes, key=lambda phase: whole.live_bytes[phase].get("device", 0))
    grown = {
        phase: tiers.get("device", 0) - deeper.live_bytes[phase].get("device", 0)
        for phase, tiers in whole.live_bytes.items()
    }
    # Where initialising decides, later phases have room to spare, which they have not in the shallow model.
    basis = _init_alone(deeper) if decides == "init" else deeper
    base = known if basis is deeper else need_of(ask, basis, constants, expandable=expandable)
    more = _most(whole, "device") - _most(basis, "device")
    if decides != "init" and get(ask.ds_config, "zero_optimization.stage") == 3:
        # Stage 3 allocates by the parameter: what is lost between blocks grows with them. Flat buffers lose the same.
        more = round(more * base.tensors_bytes / max(1, base.live_bytes))
    device = _plus(base.device, more)
    tensors = base.tensors_bytes + more
    own = base.device.peak_bytes - base.tensors_bytes
    by_phase = {phase: min(held + grown.get(phase, 0), tensors + own) for phase, held in known.by_phase.items()}
    ratio = _ratio(_most(whole, "pinned"), _most(deeper, "pinned"))
    pinned = known.pinned.times(Ratios(low=ratio, middle=ratio, high=ratio))
    host = _most(whole, "host", "pinned") - _most(deeper, "host", "pinned")
    rounding = (pinned.peak_bytes - pinned.low_bytes) - (known.pinned.peak_bytes - known.pinned.low_bytes)
    nvme = (whole.nvme_bytes - deeper.nvme_bytes) * min(ask.ranks_per_node, ask.world_size)
    return replace(
        known,
        device=device,
        beside=base.beside,
        host=_plus(known.host, host + rounding),
        pinned=pinned,
        nvme=_plus(known.nvme, nvme),
        live_bytes=_most(whole, "device"),
        tensors_bytes=tensors,
        by_phase=by_phase | {decides: tensors + own},
    )


def _highest(depths: Depths, shallow: Simulated, deeper: Simulated) -> dict[ForecastPhase, int]:
    """The step's peak on the device by the line of each bump: which decides may change with the depth.

    Not of other phases: there one layer follows another, and bumps of two depths are not the same moments.
    """
    bumps = [_bumps(simulated.traces["device"]) for simulated in (shallow, deeper) if "device" in simulated.traces]
    if len(bumps) < 2 or [phase for phase, *_ in bumps[0]] != [phase for phase, *_ in bumps[1]]:
        return {}
    found: dict[ForecastPhase, int] = {}
    for (phase, *before), (_, *after) in zip(*bumps, strict=True):
        if phase != "step":
            continue
        lines = (depths.line(low, high) for low, high in zip(before, after, strict=True))
        found[phase] = max(found.get(phase, 0), *lines)
    return found


def _bumps(trace: Trace) -> list[tuple[ForecastPhase, int, int]]:
    """Each time a phase runs, two peaks: until all that it allocated is gone for the last time, and from then on.

    Once it has freed what it found, nothing is looked for any more.
    """
    found: list[tuple[ForecastPhase, int, int]] = []
    sizes: list[int] = []
    now = 0
    for first, stop, phase in phases(trace):
        start = before = after = now
        near, fell = int(start * _NEAR), False
        for event in trace.events[first:stop]:
            if event >= 0:
                if now <= start + near and not fell:
                    before, after = max(before, after), now
                sizes.append(event)
                now += event
                after = max(after, now)
            else:
                now -= sizes[~event]
                fell = fell or now < start - near
        found.append((phase, before, after))
    return found


def _init_alone(simulated: Simulated) -> Simulated:
    """As if nothing had been run after initialising."""
    trace = simulated.traces["device"]
    stop = next((at for at, phase in trace.marks if phase != "init"), len(trace.events))
    cut = replace(
        trace,
        events=trace.events[:stop],
        marks=tuple(mark for mark in trace.marks if mark[0] < stop),
        emptied=tuple(at for at in trace.emptied if at <= stop),
        copied=tuple(copy for copy in trace.copied if copy[0] <= stop),
    )
    return replace(
        simulated, traces={**simulated.traces, "device": cut}, live_bytes={"init": simulated.live_bytes["init"]}
    )


def _lines(depths: Depths, shallow: Mapping[_Key, int], deeper: Mapping[_Key, int]) -> dict[_Key, int]:
    return {key: depths.line(shallow.get(key, 0), size) for key, size in deeper.items()}


def _most(simulated: Simulated, *tiers: Tier) -> int:
    return max((sum(held.get(tier, 0) for tier in tiers) for held in simulated.live_bytes.values()), default=0)


def _plus(known: Interval, more: int) -> Interval:
    wider = int(abs(more) * _WIDER)
    return Interval(
        low_bytes=known.low_bytes + more - wider,
        peak_bytes=known.peak_bytes + more,
        high_bytes=known.high_bytes + more + wider,
    )


def _ratio(whole: int, part: int) -> float:
    return whole / part if part else 1.0
