"""The states of activation checkpointing, and the knobs that ask for them."""

from __future__ import annotations

import pytest

from autods.config.checkpointing import INPUTS_ON_HOST, State, find_state, offloads_inputs, read_state, set_state
from autods.config.deepspeed import nest_key
from autods.types import Knobs


@pytest.mark.parametrize("state", ["off", "on", "offload"])
def test_knobs_have_the_state_that_was_set_last(state: State) -> None:
    knobs = set_state(set_state(Knobs(settings={"a": 1}), "offload"), state)
    assert find_state(knobs) == state
    assert knobs.settings["a"] == 1
    assert (INPUTS_ON_HOST in knobs.settings) == (state == "offload")


@pytest.mark.parametrize(
    ("value", "state"), [(True, "on"), ("ON", "on"), (False, "off"), ("offload", "offload"), ("maybe", None)]
)
def test_a_state_is_read_from_words_and_switches(value: object, state: State | None) -> None:
    assert read_state(value) == state


def test_a_config_says_whether_inputs_go_to_the_host() -> None:
    assert offloads_inputs(nest_key(INPUTS_ON_HOST, True))
    assert not offloads_inputs({"activation_checkpointing": {"partition_activations": True}})
