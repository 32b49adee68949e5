"""Which rungs apply to what a model is made of: rows of what DeepSpeed refuses, for a fit and a plan alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..errors import InputError
from ..ladder import Rung
from ..values import ModelFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    """DeepSpeed does not run a model that `has` something under these stages."""

    has: Callable[[ModelFacts], int]
    stages: tuple[int, ...]
    reason: str


_REFUSALS = (
    _Refusal(
        has=lambda facts: facts.pipeline_stages,
        stages=(2, 3),
        reason="a pipeline with ZeRO-{stage}: DeepSpeed refuses it, because a pipeline reduces its gradients once,"
        " after all micro batches, and ZeRO-{stage} splits them after each",
    ),
    _Refusal(
        has=lambda facts: facts.experts,
        stages=(3,),
        reason="experts with ZeRO-3: DeepSpeed refuses its own MoE layers there, because their parameters are split"
        " over the ranks already; ZeRO-1 and ZeRO-2 take them",
    ),
)

# ZeroOptimizer asserts both for MoE layers (stage_1_and_2.py, _configure_moe_settings).
_FIXED_BY_EXPERTS = ("zero_optimization.contiguous_gradients", "zero_optimization.reduce_scatter")


def refusal_of(rung: Rung, facts: ModelFacts, world_size: int) -> str | None:
    """Why this rung is not for this model on so many ranks, or None."""
    for refusal in _REFUSALS:
        if refusal.has(facts) and rung.stage in refusal.stages:
            return refusal.reason.format(stage=rung.stage)
    replicas = facts.replicas(world_size)
    if rung.least_world_size > replicas:
        if facts.pipeline_stages:
            return f"{replicas} replica{'s' if replicas > 1 else ''} of the pipeline: no sharding to gain"
        if world_size == 1:
            return "one rank: no sharding to gain"
        return f"{world_size} ranks: it needs {rung.least_world_size} or more"
    return None


def tunable(rung: Rung, facts: ModelFacts) -> Rung:
    """The rung without the keys that DeepSpeed lets nobody change for this model."""
    if not facts.experts:
        return rung
    return replace(rung, tune={key: dimension for key, dimension in rung.tune.items() if key not in _FIXED_BY_EXPERTS})


def unforeseeable(facts: ModelFacts) -> str | None:
    """Why nobody can forecast this model's memory, or None."""
    if facts.pipeline_stages:
        return "a pipeline is not forecast: its ranks hold different layers, and one rank alone is simulated"
    return None


def idle(facts: ModelFacts, global_batch: int | None) -> str | None:
    """What a pipeline loses without a global batch: a step then has one micro batch, which its stages wait for."""
    if facts.pipeline_stages < 2 or global_batch is not None:
        return None
    return (
        "a pipeline's micro batches are its accumulation, and without --global-batch that is 1:"
        f" {facts.pipeline_stages} stages then wait for each other; give the global batch that you train with"
    )


def check_ranks(facts: ModelFacts, world_size: int) -> None:
    """Raises InputError where the ranks cannot be split into replicas of the model."""
    each = facts.replica_ranks
    if world_size % each:
        near = max(each, world_size // each * each)
        raise InputError(
            f"the model is a pipeline that takes {each} ranks, and {world_size} cannot be split into such",
            mend=f"give --gpus {near}, or another multiple of {each}",
        )
