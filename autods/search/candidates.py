"""The rungs as the walk tries them: first knobs, what must be built for them, and why some are not tried at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..ds_config import compose, get, ops_of, start_settings
from ..ladder import Rung
from ..settings import Settings
from ..values import Knobs, ModelFacts
from .applies import refusal_of
from .ask import accumulation_for

_ADAM_OPS = ("cpu_adam", "fused_adam")  # torch's AdamW can stand in for these
_PINS = tuple(f"zero_optimization.offload_{part}.pin_memory" for part in ("param", "optimizer"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A rung as the walk tries it.

    stand_in: its own optimizer is an op that may have to be built, so torch's AdamW takes the first look.
    skip: why it is not tried, or None. ops: what its own optimizer and NVMe need built. pinned: its keys that pin host
    memory.
    """

    rung: Rung
    knobs: Knobs
    stand_in: bool
    skip: str | None
    ops: tuple[str, ...] = ()
    pinned: tuple[str, ...] = ()


def candidates(settings: Settings, facts: ModelFacts, op_problems: Mapping[str, str]) -> tuple[Candidate, ...]:
    """One per rung of the ladder, fastest first. op_problems: op → why it cannot be built here."""
    return tuple(_candidate(rung, settings, facts, op_problems) for rung in settings.ladder)


def _candidate(rung: Rung, settings: Settings, facts: ModelFacts, op_problems: Mapping[str, str]) -> Candidate:
    # More accumulation than 2 needs no more memory: the second micro batch is the first that runs beside kept
    # gradients, the others repeat it. Growing solves for the true number.
    replicas = facts.replicas(settings.gpus)
    accumulation = min(2, accumulation_for(settings.global_batch, 1, replicas))
    knobs = Knobs(
        micro_batch=1,
        accumulation=accumulation,
        checkpointing=facts.checkpointing,
        settings=start_settings(rung, base=settings.base, device_bytes=settings.device_bytes, facts=facts),
    )
    native = compose(
        rung,
        knobs,
        base=settings.base,
        world_size=replicas,
        own_optimizer=facts.has_optimizer,
        nvme_path=settings.nvme_path,
    )
    ops = ops_of(native)
    return Candidate(
        rung=rung,
        knobs=knobs,
        stand_in=any(op in _ADAM_OPS for op in ops),
        skip=refusal_of(rung, facts, settings.gpus) or _why_not(rung, settings, ops, op_problems),
        ops=ops,
        pinned=tuple(key for key in _PINS if get(native, key) is True),
    )


def _why_not(rung: Rung, settings: Settings, ops: tuple[str, ...], op_problems: Mapping[str, str]) -> str | None:
    if rung.needs_nvme_path and settings.nvme_path is None:
        return "no --nvme-path was given"
    for op in ops:
        if op in op_problems:
            return f"its op {op} cannot be built: {op_problems[op]}"
    return None
