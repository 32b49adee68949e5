"""The steps of a trial and its time limits: of silence in each phase, of the whole, and of its end.

The limits of the profile hold for small models. A large one has more: seconds for the bytes that a phase moves, at
speeds that even a slow machine reaches. A hang of a small model is found as soon as ever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config.deepspeed import find_offloads, get_key
from ..config.profiles import TimeLimits
from ..rank.exam import MOST_STEPS
from ..types import PHASES, Exam, Knobs, ModelFacts, Phase, Steps, Trial

_FILES = 1e8  # bytes a second: a network file system, or a disk that others use
_NVME = 2.5e8
_NETWORK = 2.5e8  # between the ranks
_HOST = 1e9  # copied, updated, pinned and freed in host memory, on a few cores
_WEIGHTS, _HALF, _STATES, _CHECKPOINT = 4, 2, 16, 14  # bytes of a parameter: in fp32, in bf16, with Adam's, saved
_UPDATED = 28  # bytes of a parameter that an optimizer step reads and writes
_SLOWER = 10  # times the seconds that a micro batch took before
_END_S = 60.0  # for killed ranks without large memory: a file system may hold them
_SLOW_PHASES = ("start", "rendezvous", "build", "init", "save", "load")


def silence_limits(limits: TimeLimits) -> dict[Phase, float]:
    """Return the seconds after which silent ranks are stuck, by phase, for a model of any small size.

    Ranks build ops, load weights, read data or write a checkpoint in the slow phases, and a compiler may take minutes.
    """
    by_phase: dict[Phase, float] = {
        phase: limits.init_s if phase in _SLOW_PHASES else limits.stall_s for phase in PHASES
    }
    return by_phase | {"compile": max(limits.build_s, limits.stall_s)}


def warm_up(trial: Trial, config: Mapping[str, Any]) -> Steps:
    """Return the steps of a trial. One that measures speed under ZeRO-3 warms up for two micro batches at least.

    ZeRO-3 records the order of the modules in the first. In the second it prefetches by that order and keeps more
    parameters gathered, for which the allocator takes new memory from the device. The third is as all that follow
    (`reset_step` and `fetch_sub_module` of DeepSpeed's partitioned_param_coordinator.py).
    """
    steps, is_stage_3 = trial.steps, get_key(config, "zero_optimization.stage") == 3
    measures = trial.exam is None and steps.timed > 1
    if is_stage_3 and measures and trial.knobs.accumulation == 1:
        return replace(steps, warmup=max(2, steps.warmup))
    return steps


def limit_training(
    limits: TimeLimits,
    knobs: Knobs,
    facts: ModelFacts,
    ds_config: Mapping[str, Any],
    *,
    nodes: int,
    sample_s: float,
    steps: Steps,
    exam: Exam | None,
) -> dict[str, Any]:
    """Return the limits of training with this config, the fields `silence_s`, `wall_s` and `end_s` of its `RankJob`.

    `sample_s` are the seconds that a sample of a rank took in the slowest trial before, 0 where there is none.
    """
    moved_s = _time_bytes(facts, ds_config, nodes=nodes)
    repeats = knobs.accumulation if facts.pipeline_stages else 1  # a pipeline is silent for a whole step
    computed_s = _SLOWER * sample_s * knobs.micro_batch * repeats
    for phase in ("forward", "backward", "evaluate"):
        moved_s[phase] += computed_s
    silence_s = silence_limits(limits)
    count = steps.warmup + steps.most_timed + 2
    step_s = (moved_s["forward"] + moved_s["backward"]) * knobs.accumulation + moved_s["step"]
    exam_s = 0.0
    if exam == "worst_case":
        exam_s = MOST_STEPS * step_s + 2 * moved_s["evaluate"] + moved_s["save"] + moved_s["load"]
    return {
        "silence_s": {phase: seconds + moved_s.get(phase, 0.0) for phase, seconds in silence_s.items()},
        "wall_s": limits.wall_s + moved_s["build"] + moved_s["init"] + count * step_s + exam_s,
        "end_s": _END_S + moved_s["init"],  # what it pinned is unpinned, and its swap files are removed
    }


_PATIENCE_S, _LEAST_MINUTES = 600.0, 30  # DeepSpeed's timeout from 0.19.6 on, and before


def choose_group_timeout(facts: ModelFacts, ds_config: Mapping[str, Any], *, nodes: int) -> int | None:
    """Return the minutes that process groups should wait for a rank that loads or saves; None where DeepSpeed's do."""
    moved_s = _time_bytes(facts, ds_config, nodes=nodes)
    longest_s = max(moved_s[phase] for phase in _SLOW_PHASES if phase in moved_s)
    return max(_LEAST_MINUTES, math.ceil(2 * longest_s / 60)) if longest_s > _PATIENCE_S else None


def _time_bytes(facts: ModelFacts, ds_config: Mapping[str, Any], *, nodes: int) -> dict[Phase, float]:
    """Return the seconds for the bytes of each phase; the ranks of a node share its disk and its memory."""
    offloads = find_offloads(ds_config)
    whole, share = facts.parameters, facts.parameters / nodes
    states = _NVME if "nvme" in offloads.values() else _HOST
    gathered_s = whole * _HALF / (_NVME if offloads.get("param") == "nvme" else _NETWORK)
    return {
        "build": whole * _WEIGHTS / _FILES,
        "init": whole * _HALF / _NETWORK + share * _STATES / states,
        "forward": gathered_s,
        "backward": gathered_s,
        "step": gathered_s + (share * _UPDATED / states if "optimizer" in offloads else 0.0),
        "evaluate": gathered_s,
        "save": share * _CHECKPOINT / _FILES + gathered_s,
        "load": share * _CHECKPOINT / _FILES,
    }
