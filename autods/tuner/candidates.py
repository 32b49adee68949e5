"""The rungs that can be tried with this model on this machine, and their first configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..config.deepspeed import compose, get_key, required_ops, start_settings
from ..config.rungs import Rung
from ..config.settings import Settings
from ..errors import InputError
from ..types import Knobs, ModelFacts, Scalar, Steps, Trial
from .trials import accumulation_for

# (what the model has, the ZeRO stages under which DeepSpeed refuses it, the reason)
_REFUSALS: tuple[tuple[Callable[[ModelFacts], int], tuple[int, ...], str], ...] = (
    (
        lambda facts: facts.pipeline_stages,
        (2, 3),
        "a pipeline with ZeRO-{stage}: DeepSpeed refuses it, because a pipeline reduces its gradients once,"
        " after all micro batches, and ZeRO-{stage} splits them after each",
    ),
    (
        lambda facts: facts.experts,
        (3,),
        "experts with ZeRO-3: DeepSpeed refuses its own MoE layers there, because their parameters are split"
        " over the ranks already; ZeRO-1 and ZeRO-2 take them",
    ),
)
# ZeroOptimizer asserts both for MoE layers (stage_1_and_2.py, _configure_moe_settings).
_FIXED_BY_EXPERTS = ("zero_optimization.contiguous_gradients", "zero_optimization.reduce_scatter")
_PINS = tuple(f"zero_optimization.offload_{part}.pin_memory" for part in ("param", "optimizer"))
_HALVES = ("bf16", "fp16")


def refusal_reason(rung: Rung, facts: ModelFacts, world_size: int) -> str | None:
    """The reason that this rung cannot train this model on so many ranks; None when it can."""
    for has, stages, reason in _REFUSALS:
        if has(facts) and rung.stage in stages:
            return reason.format(stage=rung.stage)
    replicas = facts.replicas(world_size)
    if rung.needs.world_size > replicas:
        if facts.pipeline_stages:
            return f"{replicas} replica{'s' if replicas > 1 else ''} of the pipeline: no sharding to gain"
        if world_size == 1:
            return "one rank: no sharding to gain"
        return f"{world_size} ranks: it needs {rung.needs.world_size} or more"
    return None


def without_fixed_keys(rung: Rung, facts: ModelFacts) -> Rung:
    """The rung without tunable keys that DeepSpeed fixes for this model."""
    if not facts.experts:
        return rung
    return replace(rung, tune={key: dimension for key, dimension in rung.tune.items() if key not in _FIXED_BY_EXPERTS})


def why_not_forecast(facts: ModelFacts) -> str | None:
    """The reason that this model's memory cannot be forecast; None when it can."""
    if facts.pipeline_stages:
        return "a pipeline is not forecast: its ranks hold different layers, and one rank alone is simulated"
    return None


def idle_stages_warning(facts: ModelFacts, global_batch: int | None) -> str | None:
    """A warning for a pipeline without a global batch: with one micro batch a step its stages wait for each other."""
    if facts.pipeline_stages < 2 or global_batch is not None:
        return None
    return (
        "a pipeline's micro batches are its accumulation, and without --global-batch that is 1:"
        f" {facts.pipeline_stages} stages then wait for each other; give the global batch that you train with"
    )


def check_ranks(facts: ModelFacts, world_size: int) -> None:
    """Raise InputError where the ranks cannot be split into replicas of the model."""
    each = facts.replica_ranks
    if world_size % each:
        near = max(each, world_size // each * each)
        raise InputError(
            f"the model is a pipeline that takes {each} ranks, and {world_size} is no multiple of that",
            hint=f"give --gpus {near}, or another multiple of {each}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A rung with the knobs of its first trial.

    `skip` is the reason not to try it, or None.
    `ops` are the DeepSpeed ops that have to be built for it.
    `pinned` are the config keys that pin host memory.
    """

    rung: Rung
    knobs: Knobs
    skip: str | None
    ops: tuple[str, ...] = ()
    pinned: tuple[str, ...] = ()


def list_candidates(settings: Settings, facts: ModelFacts, op_problems: Mapping[str, str]) -> tuple[Candidate, ...]:
    """One candidate per rung of the ladder, fastest first. `op_problems`: op → why it cannot be built here."""
    replicas = facts.replicas(settings.gpus)
    # Accumulation above 2 needs no more memory: from the second micro batch on, each runs with kept gradients.
    # Growth sets the accumulation of the global batch.
    accumulation = min(2, accumulation_for(settings.global_batch, 1, replicas))
    candidates = []
    for rung in settings.ladder:
        start = start_settings(rung, base=settings.base, device_bytes=settings.device_bytes, facts=facts)
        knobs = Knobs(accumulation=accumulation, checkpointing=facts.checkpointing, settings=start)
        config = compose(
            rung,
            knobs,
            base=settings.base,
            world_size=replicas,
            own_optimizer=facts.has_optimizer,
            nvme_path=settings.nvme_path,
        )
        ops = required_ops(config)
        skip = refusal_reason(rung, facts, settings.gpus)
        if skip is None and rung.needs.nvme_path and settings.nvme_path is None:
            skip = "no --nvme-path was given"
        if skip is None and (op := next((op for op in ops if op in op_problems), None)) is not None:
            skip = f"its op {op} cannot be built: {op_problems[op]}"
        pinned = tuple(key for key in _PINS if get_key(config, key) is True)
        candidates.append(Candidate(rung=rung, knobs=knobs, skip=skip, ops=ops, pinned=pinned))
    return tuple(candidates)


def first_trial(candidate: Candidate, steps: Steps, micro_batch: int) -> Trial:
    """The trial that shows whether a rung fits."""
    knobs = replace(candidate.knobs, micro_batch=micro_batch)
    return Trial(rung=candidate.rung.name, knobs=knobs, purpose="walk", steps=steps)


def without_checkpointing(candidate: Candidate) -> Candidate:
    """The candidate with activations kept instead of recomputed: less arithmetic, more memory."""
    return replace(candidate, knobs=replace(candidate.knobs, checkpointing=False))


def in_precision(candidate: Candidate, precision: str) -> Candidate:
    """The candidate in bf16, fp16 or fp32, whatever the base config says."""
    enabled: dict[str, Scalar] = {f"{half}.enabled": half == precision for half in _HALVES}
    settings = {**candidate.knobs.settings, **enabled}
    return replace(candidate, knobs=replace(candidate.knobs, settings=settings))


def config_name(rung: str, knobs: Knobs, *, recomputes: bool) -> str:
    """The rung and its unusual knobs, for people. `recomputes`: the model supports gradient checkpointing."""
    return f"{rung} {unusual_knobs(knobs, recomputes=recomputes or knobs.checkpointing)}".rstrip()


def unusual_knobs(knobs: Knobs, *, recomputes: bool) -> str:
    """'in fp16', 'without checkpointing', both or nothing; 'recomputing' where `recomputes` is false."""
    words = []
    if any(f"{half}.enabled" in knobs.settings for half in _HALVES):
        words.append(f"in {next((half for half in _HALVES if knobs.settings.get(f'{half}.enabled')), 'fp32')}")
    if knobs.checkpointing is not recomputes:
        words.append("recomputing" if knobs.checkpointing else "without checkpointing")
    return " ".join(words)
