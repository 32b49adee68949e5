"""The rungs that can be tried with this model on this machine, and their first configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..config.catalogue import Site
from ..config.checkpointing import State, set_state
from ..config.deepspeed import (
    ENOUGH_ACCUMULATION,
    HALVES,
    PINS,
    accumulation_for,
    compose,
    count_replicas,
    find_broken_op,
    get_key,
    required_ops,
    start_settings,
)
from ..config.rungs import Rung, tune_at, unmet_need
from ..config.settings import Settings
from ..report.trial_names import unusual_knobs
from ..types import Knobs, ModelFacts, Scalar, Steps, Trial

# ZeroOptimizer asserts both for MoE layers (stage_1_and_2.py, _configure_moe_settings).
_FIXED_BY_EXPERTS = ("zero_optimization.contiguous_gradients", "zero_optimization.reduce_scatter")


def with_open_keys(rung: Rung, site: Site, facts: ModelFacts) -> Rung:
    """The rung with those tunable keys that can gain at this site, and that DeepSpeed does not fix for this model."""
    fixed = _FIXED_BY_EXPERTS if facts.experts else ()
    return replace(rung, tune={key: row for key, row in tune_at(rung, site).items() if key not in fixed})


def idle_stages_warning(facts: ModelFacts, global_batch: int | None) -> str | None:
    """A warning for a pipeline without a global batch: with few micro batches a step its stages wait for each other."""
    if facts.pipeline_stages < 2 or global_batch is not None:
        return None
    return (
        f"a pipeline's micro batches are its accumulation, and without --global-batch those are {ENOUGH_ACCUMULATION}:"
        f" {facts.pipeline_stages} stages then wait for each other; give the global batch that you train with"
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

    def copies_beside(self, other: Candidate) -> bool:
        """Whether this is the other candidate with states on a slower tier, and unlike it in no other way."""
        alike = (unusual_knobs(each.knobs, recomputes=True) for each in (self, other))
        return len(set(alike)) == 1 and self.rung.copies_beside(other.rung)


def list_candidates(settings: Settings, facts: ModelFacts, op_problems: Mapping[str, str]) -> tuple[Candidate, ...]:
    """One candidate per rung of the ladder, fastest first. `op_problems`: op → why it cannot be built here."""
    site, replicas = settings.site, count_replicas(settings.base, settings.gpus, facts)
    # More accumulation needs no more memory. Growth sets that of the global batch.
    accumulation = accumulation_for(settings.global_batch, 1, replicas, settings.default_accumulation)
    accumulation = min(ENOUGH_ACCUMULATION, accumulation)
    candidates = []
    for rung in settings.ladder:
        start = start_settings(rung, base=settings.base, device_bytes=settings.device_bytes, facts=facts)
        knobs = Knobs(accumulation=accumulation, checkpointing=facts.checkpointing, settings=start)
        config = compose(rung, knobs, site, facts)
        skip = unmet_need(rung, site, facts) or find_broken_op(config, op_problems)
        pinned = tuple(key for key in PINS if get_key(config, key) is True)
        ops = required_ops(config)
        candidates.append(Candidate(rung=rung, knobs=knobs, skip=skip, ops=ops, pinned=pinned))
    return tuple(candidates)


def first_trial(candidate: Candidate, steps: Steps, micro_batch: int) -> Trial:
    """The trial that shows whether a rung fits."""
    knobs = replace(candidate.knobs, micro_batch=micro_batch)
    return Trial(rung=candidate.rung.name, knobs=knobs, purpose="walk", steps=steps)


def without_checkpointing(candidate: Candidate) -> Candidate:
    """The candidate with activations kept instead of recomputed: less arithmetic, more memory."""
    return in_state(candidate, "off")


def in_state(candidate: Candidate, state: State) -> Candidate:
    """The candidate in this state of checkpointing."""
    return replace(candidate, knobs=set_state(candidate.knobs, state))


def in_precision(candidate: Candidate, precision: str) -> Candidate:
    """The candidate in bf16, fp16 or fp32, whatever the base config says."""
    enabled: dict[str, Scalar] = {f"{half}.enabled": half == precision for half in HALVES}
    settings = {**candidate.knobs.settings, **enabled}
    return replace(candidate, knobs=replace(candidate.knobs, settings=settings))
