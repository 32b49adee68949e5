"""The engine's refusal is put beside the key that it is about."""

from __future__ import annotations

from typing import Any, cast

import pytest

from autods.config.deepspeed import get_key
from autods.explainer.toy_engine import ask_engine, ask_repeatedly, find_named_keys
from autods.forecast.simulate.protocol import SimulationFailed
from autods.forecast.values import EngineSpec, Simulator

CONFIG: dict[str, Any] = {
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
    "prescale_gradients": True,
    "data_types": {"grad_accum_dtype": "float64"},
    "scheduler": {"type": "WarmupDecayLR"},
    "optimizer": {"type": "AdamW", "params": {"lrr": 1}},
}
MESSAGES = {
    "pre-scale gradients is not yet supported with reduce scatter enabled": "prescale_gradients",
    "Bf16_master_weights_and_grads is only supported with ZeRO": "bf16.bf16_master_weights_and_grads",
    "'float64' is not a valid DtypeEnum": "data_types.grad_accum_dtype",
    "WarmupDecayLR.__init__() missing 1 required positional argument": "scheduler.type",
    "AdamW.__init__() got an unexpected keyword argument 'lrr'": "optimizer.params.lrr",
    "bf16 and fp16 modes cannot be simultaneously enabled": "bf16.enabled",
    "the ranks are enabled by type": None,
}


@pytest.mark.parametrize("message", MESSAGES)
def test_a_refusal_is_about_the_key_that_it_names(message: str) -> None:
    assert next(find_named_keys(CONFIG, message), None) == MESSAGES[message]


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
