"""A message of DeepSpeed's is about a key of the config."""

from __future__ import annotations

from typing import Any

import pytest

from autods.config.problems import find_named_keys

CONFIG: dict[str, Any] = {
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
    "prescale_gradients": True,
    "data_types": {"grad_accum_dtype": "float64"},
    "scheduler": {"type": "WarmupDecayLR"},
    "optimizer": {"type": "AdamW", "params": {"lrr": 1}},
    "tensorboard": {"job_name": "Foo"},
}
MESSAGES = {
    "pre-scale gradients is not yet supported with reduce scatter enabled": "prescale_gradients",
    "Bf16_master_weights_and_grads is only supported with ZeRO": "bf16.bf16_master_weights_and_grads",
    "'float64' is not a valid DtypeEnum": "data_types.grad_accum_dtype",
    "WarmupDecayLR.__init__() missing 1 required positional argument": "scheduler.type",
    "AdamW.__init__() got an unexpected keyword argument 'lrr'": "optimizer.params.lrr",
    "bf16 and fp16 modes cannot be simultaneously enabled": "bf16.enabled",
    "the ranks are enabled by type": None,
    "Foo is not a supported DeepSpeed Optimizer": None,  # a short value of another section
}


@pytest.mark.parametrize("message", MESSAGES)
def test_a_refusal_is_about_the_key_that_it_names(message: str) -> None:
    assert next(find_named_keys(CONFIG, message), None) == MESSAGES[message]


def test_a_short_value_counts_where_its_section_is_named() -> None:
    config = {"optimizer": {"type": "Foo"}}
    assert [*find_named_keys(config, "Foo is not a supported DeepSpeed Optimizer")] == ["optimizer.type"]
