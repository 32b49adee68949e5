"""The formulas against the real engine: Llama-7B on 8 ranks, as DeepSpeed itself allocated it on a simulated GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autods.config.deepspeed import compose
from autods.config.strategies import all_rungs
from autods.forecast.formulas import ASSUMED, estimated
from autods.forecast.values import PHASES, Ask, Simulated
from autods.forecast.verdict import judged
from autods.types import Knobs, ModelFacts

GIB = 2**30
# Stage 3 under zero.Init.
# 32 layers of width 4096, vocabulary 32000; sequence 2048, batch 1, recomputed: the forward pass adds 1.15 GiB.
LLAMA = ModelFacts(
    parameters=6_738_415_616, largest_parameter=131_072_000, checkpointing=True, tokens_per_sample=2048,
    has_optimizer=False,
)  # fmt: skip
ACTIVATIONS = int(1.15 * GIB)

# Peaks in GiB of the second step: init, forward, backward, step; then pageable and pinned at the end.
SIMULATED: Mapping[str, tuple[float, float, float, float, float, float]] = {
    "ddp": (113.0, 89.0, 101.6, 150.6, 0, 0),
    "zero1": (25.1, 23.1, 36.1, 28.3, 0, 0),
    "zero2": (25.1, 23.1, 25.1, 28.3, 0, 0),
    "zero2-offload": (25.1, 14.0, 15.5, 12.8, 6.28, 8.09),
    "zero3": (7.8, 16.5, 17.1, 18.2, 0, 0),
    "zero3-offload-param": (6.3, 15.0, 15.5, 16.6, 0, 1.57),
    "zero3-offload": (1.2, 4.0, 4.6, 0.9, 9.41, 6.28),
    "zero3-nvme": (1.2, 4.0, 4.8, 0.9, 0, 16.6),
}


def ask(rung: str, world_size: int = 8, zero_init: bool = True, **base: Any) -> Ask:
    config = compose(
        all_rungs()[rung],
        Knobs(),
        base={"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, **base},
        world_size=world_size,
        own_optimizer=False,
        nvme_path=Path("/nvme"),
    )
    return Ask(
        rung=rung, ds_config=config, world_size=world_size, ranks_per_node=8, device_bytes=80 * GIB, zero_init=zero_init
    )  # fmt: skip


def of(rung: str, world_size: int = 8, **base: Any) -> Simulated:
    return estimated(ask(rung, world_size, **base), LLAMA, micro_batch=1, activation_bytes=ACTIVATIONS)


@pytest.mark.parametrize("rung", SIMULATED)
def test_each_phase_is_within_15_percent_of_the_engine(rung: str) -> None:
    live = of(rung).live_bytes
    for phase, expected in zip(PHASES, SIMULATED[rung], strict=False):
        assert live[phase]["device"] / GIB == pytest.approx(expected, rel=0.15), phase


@pytest.mark.parametrize("rung", SIMULATED)
def test_the_peak_is_within_6_percent_of_the_engine(rung: str) -> None:
    peak = max(tiers["device"] for tiers in of(rung).live_bytes.values())
    assert peak / GIB == pytest.approx(max(SIMULATED[rung][:4]), rel=0.06)


@pytest.mark.parametrize("rung", SIMULATED)
def test_host_memory_is_within_2_percent_of_the_engine(rung: str) -> None:
    tiers = of(rung).live_bytes["step"]
    assert tiers["host"] / GIB == pytest.approx(SIMULATED[rung][4], rel=0.02)
    assert tiers["pinned"] / GIB == pytest.approx(SIMULATED[rung][5], rel=0.02)


def test_without_zero_init_the_whole_model_lies_on_the_device_for_a_moment() -> None:
    split, whole = (ask("zero3-offload", zero_init=zero_init) for zero_init in (True, False))

    def init(engine: Ask) -> int:
        return estimated(engine, LLAMA, micro_batch=1, activation_bytes=0).live_bytes["init"]["device"]

    assert init(whole) == 2 * LLAMA.parameters
    assert init(split) < init(whole) / 10


def test_nvme_holds_18_bytes_of_each_parameter_of_a_shard() -> None:
    assert of("zero3-nvme").nvme_bytes == 18 * LLAMA.parameters // 8
    assert of("zero3").nvme_bytes == 0


def test_accumulation_keeps_a_second_shard_of_gradients_at_stage_2() -> None:
    def backward(steps: int) -> int:
        engine = ask("zero2")
        config = {**engine.ds_config, "gradient_accumulation_steps": steps}
        made = Ask(rung="zero2", ds_config=config, world_size=8, ranks_per_node=8, device_bytes=engine.device_bytes)
        return estimated(made, LLAMA, micro_batch=1, activation_bytes=0).live_bytes["backward"]["device"]

    assert backward(2) - backward(1) == 2 * LLAMA.parameters // 8


def test_more_ranks_leave_less_on_each() -> None:
    assert max(t["device"] for t in of("zero3", 64).live_bytes.values()) < max(
        t["device"] for t in of("zero3", 8).live_bytes.values()
    )


@pytest.mark.parametrize("rung", SIMULATED)
def test_the_breakdown_adds_up_to_the_peak(rung: str) -> None:
    found = of(rung)
    assert sum(found.breakdown.values()) == max(tiers["device"] for tiers in found.live_bytes.values())


def test_an_estimate_can_be_judged_and_says_that_it_is_one() -> None:
    forecast = judged(ask("zero2"), of("zero2"), limits={"device": 80 * GIB})
    assert (forecast.verdict, forecast.exact, forecast.assumed) == ("fits", False, (ASSUMED,))
    assert forecast.decides == "step"
    held = forecast.memory["device"]
    assert held.low_bytes < 28.3 * GIB < held.high_bytes


def test_sgd_keeps_a_moment_only_with_momentum() -> None:
    def peak(**params: float) -> int:
        sgd = {"type": "SGD", "params": {"lr": 0.1, **params}}
        return of("zero1", optimizer=sgd).live_bytes["step"]["device"]

    shard_bytes = LLAMA.parameters // 8 * 4
    assert peak(momentum=0.9) - peak() == pytest.approx(shard_bytes, rel=0.01)
    assert peak(momentum=0.0) == peak()
