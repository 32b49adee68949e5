"""The engine's refusal is put beside the key that it is about."""

from __future__ import annotations

from typing import Any, cast

from autods.config.deepspeed import get_key
from autods.explainer.toy_engine import ask_engine, ask_repeatedly
from autods.forecast.simulate.protocol import SimulationFailed
from autods.forecast.values import EngineSpec, Simulator


class Listener:
    """A simulator that only notes what it is asked."""

    config: dict[str, Any]

    def simulate(self, spec: EngineSpec, micro_batches: list[int]) -> None:
        self.config = dict(spec.ds_config)


def test_a_precision_that_a_library_chooses_is_not_tried() -> None:
    simulator = Listener()
    halves = {"fp16": {"enabled": "auto", "auto_cast": True, "loss_scale": 0}, "bf16": {"enabled": "auto"}}
    assert ask_engine(cast(Simulator, simulator), {"zero_optimization": {"stage": 1}, **halves}, 8) is None
    assert simulator.config.keys().isdisjoint(halves)


def test_what_depends_on_the_models_sizes_is_not_tried() -> None:
    simulator = Listener()
    zero = {"stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 8}
    assert ask_engine(cast(Simulator, simulator), {"zero_optimization": zero}, 8) is None
    assert simulator.config["zero_optimization"] == {**zero, "zero_quantized_weights": False}


class Refuser:
    """A simulator that refuses each config with that key at that value, in words that name no key."""

    def __init__(self, key: str, value: Any) -> None:
        self.key, self.value = key, value

    def simulate(self, spec: EngineSpec, micro_batches: list[int]) -> None:
        if get_key(spec.ds_config, self.key) == self.value:
            raise SimulationFailed(kind="engine", problem="AttributeError: 'NoneType' object has no attribute 'upper'")


def test_the_innermost_guilty_key_is_named() -> None:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1, "legacy_stage1": True}}
    simulator = cast(Simulator, Refuser("zero_optimization.legacy_stage1", True))
    (refusal,) = ask_repeatedly(simulator, config, 8)
    assert refusal.key == "zero_optimization.legacy_stage1"


def test_a_refusal_of_every_config_is_about_the_engine() -> None:
    (refusal,) = ask_repeatedly(cast(Simulator, Refuser("no_key", None)), {"bf16": {"enabled": True}}, 8)
    assert refusal.key == "deepspeed.initialize"
