"""Ask DeepSpeed's engine about a config: it is built around a toy model on the simulated GPU, and steps twice."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config.deepspeed import (
    BATCH_KEYS,
    DEFAULT_OPTIMIZER,
    HALVES,
    SEQUENCE_RANKS,
    count_sharers,
    get_key,
    leave_out,
    leave_out_auto,
    merge,
    nest_key,
    without_monitors,
)
from ..config.problems import Problem, Question, find_named_keys
from ..forecast.simulate.client import ProcessSimulator
from ..forecast.simulate.protocol import SimulationFailed
from ..forecast.stored_simulations import store_answers
from ..forecast.values import EngineSpec, Simulator
from ..runner.cleanup import open_session, simulator_variables
from ..types import WorkloadSource

_TOY = Path(__file__).with_name("toy_model.py")
_ENGINE = "deepspeed.initialize"  # the place of what names no key
_ARGUMENTS = "optimizer.params"
# Turned off for the toy: an optimizer in a child, which nothing simulates, and sizes that 8 has to divide on each rank.
_TURNED_OFF = (
    "zero_optimization.offload_optimizer.super_offload", "zero_optimization.zero_quantized_weights",
)  # fmt: skip
_UNKNOWN_ARGUMENT = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '\w+'")
_LIMIT_S = 120.0
_MOST_ACCUMULATED = 64  # micro batches of a step
_MOST_LEFT_OUT = 20  # keys of a section, each left out once to find the one that is refused; half a second each
# Keys that others rest on: without them those do nothing, so they are left out last.
_BASES = ("optimizer", *HALVES, "stage", "type", "device", "enabled")
# They need a model or batches of their own, a launcher, or packages that this machine may lack.
_NOT_TRIED = (
    "autotuning", "compile", "compression_training", "curriculum_learning", "data_efficiency", "data_parallel_size",
    "datastates_ckpt", "elasticity", "expert_parallel", "hybrid_engine", "nebula", "progressive_layer_drop",
    "tensor_parallel",
)  # fmt: skip


def find_refusals(config: Mapping[str, Any], ranks: int | None) -> tuple[Problem, ...]:
    """Return what the engine says against the config while it is built and steps; nothing where it trains.

    Without `ranks` the sizes of the batch are not judged, nor is what a library will fill in. It takes some seconds.
    A note says why the engine could not be asked.
    """
    with start_toy() as simulator:
        return tuple(ask_repeatedly(simulator, config, ranks))


def ask_repeatedly(simulator: Simulator, config: Mapping[str, Any], ranks: int | None) -> Iterator[Problem]:
    """Yield each refusal, as `find_refusals` does.

    The engine ends at the first; without an argument of the optimizer it may name another.
    """
    while (refusal := ask_engine(simulator, config, ranks)) is not None:
        if refusal.key == _ENGINE and refusal.severity == "error":
            refusal = replace(refusal, key=_find_guilty_key(simulator, config, ranks, refusal.problem))
        yield refusal
        section, _, argument = refusal.key.rpartition(".")
        if section != _ARGUMENTS:
            return
        kept = {name: value for name, value in get_key(config, section).items() if name != argument}
        config = {**config, "optimizer": {**config["optimizer"], "params": kept}}


def _find_guilty_key(simulator: Simulator, config: Mapping[str, Any], ranks: int | None, problem: str) -> str:
    """Return the innermost key without which the engine says something else, or nothing; `_ENGINE` without one.

    It is a section where no key of it is guilty alone.
    """
    guilty = ""
    while True:
        section = get_key(config, guilty) if guilty else config
        names = [name for name in section if name not in BATCH_KEYS] if isinstance(section, Mapping) else []
        for name in sorted(names, key=_BASES.__contains__)[:_MOST_LEFT_OUT]:
            key = f"{guilty}.{name}".lstrip(".")
            refusal = ask_engine(simulator, leave_out(config, key), ranks)
            if refusal is None or refusal.problem != problem:
                guilty = key
                break
        else:
            return guilty or _ENGINE


@contextmanager
def start_toy() -> Iterator[Simulator]:
    """A simulator of the toy model."""
    source = WorkloadSource(kind="file", path=str(_TOY), name=_TOY.stem, digest="")
    with open_session():
        processes = ProcessSimulator(source, limit_s=_LIMIT_S, variables=simulator_variables())
        with store_answers(processes, source) as simulator:
            yield simulator


def ask_engine(simulator: Simulator, config: Mapping[str, Any], ranks: int | None) -> Problem | None:
    """Ask a simulator of the toy model once, as `find_refusals` does."""
    world = ranks or count_sharers(config, SEQUENCE_RANKS)
    spec = EngineSpec(
        rung="toy",
        ds_config=_make_toy_config(config, is_world_known=ranks is not None),
        world_size=world,
        ranks_per_node=world,
        device_bytes=80 << 30,
        checkpointing=False,
    )
    try:
        simulator.simulate(spec, [1])
    except SimulationFailed as error:
        if error.kind in ("engine", "user_code"):  # the toy trains with usual configs
            key = next(find_named_keys(config, error.problem), _ENGINE)
            if (unknown := _UNKNOWN_ARGUMENT.search(error.problem)) and key != _ENGINE:
                problem = f"{unknown[1]} takes no such argument"
                return Problem(severity="error", key=key, problem=problem, hint="leave it out")
            return Problem(severity="error", key=key, problem=error.problem, hint=error.hint or "")
        if error.kind in ("no_compiler", "build_failed", "environment"):
            return Problem(severity="note", key=_ENGINE, problem=f"the engine was not asked: {error.problem}")
    return None


def _make_toy_config(config: Mapping[str, Any], *, is_world_known: bool) -> dict[str, Any]:
    """The part of the config that a toy model can try."""
    toy = {key: value for key, value in without_monitors(config).items() if key not in _NOT_TRIED}
    toy = leave_out_auto(toy)
    accumulation = toy.get("gradient_accumulation_steps")
    is_long = isinstance(accumulation, int) and accumulation > _MOST_ACCUMULATED
    if is_long or not is_world_known or "auto" in map(config.get, BATCH_KEYS):
        toy = {key: value for key, value in toy.items() if key not in BATCH_KEYS} | {BATCH_KEYS[1]: 1}
    if get_key(toy, "zero_optimization.stage") is not None:
        toy = merge(toy, nest_key("zero_optimization.stage", Question(config=config).stage))  # it may be text
    for key in _TURNED_OFF:
        toy = merge(toy, nest_key(key, False)) if get_key(toy, key) else toy
    if get_key(toy, "optimizer.type") is None and toy.get("optimizer", {}) is not None:  # the training brings one
        toy["optimizer"] = DEFAULT_OPTIMIZER
    return toy
