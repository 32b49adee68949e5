"""The states of activation checkpointing, and the knobs that ask for them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from autods.config.checkpointing import (
    INPUTS_ON_HOST,
    STATES,
    State,
    find_state,
    is_as_lean,
    offloads_inputs,
    read_state,
    set_state,
    why_impossible,
)
from autods.config.deepspeed import nest_key
from autods.types import FORMS, Knobs
from tests.support.planned import FACTS


@pytest.mark.parametrize("state", STATES)
def test_knobs_have_the_state_that_was_set_last(state: State) -> None:
    knobs = set_state(set_state(Knobs(settings={"a": 1}), "offload"), state)
    assert find_state(knobs) == state
    assert knobs.settings["a"] == 1
    assert (INPUTS_ON_HOST in knobs.settings) == (state == "offload")


@pytest.mark.parametrize(
    ("value", "state"),
    [(True, "on"), ("ON", "on"), (False, "off"), ("offload", "offload"), ("every-2", "every-2"), ("maybe", None)],
)
def test_a_state_is_read_from_words_and_switches(value: object, state: State | None) -> None:
    assert read_state(value) == state


def test_more_recomputed_layers_are_leaner() -> None:
    states = [set_state(Knobs(), state) for state in STATES]
    assert all(is_as_lean(leaner, other) for other, leaner in pairwise(states))
    assert not any(is_as_lean(other, leaner) for other, leaner in pairwise(states))


@pytest.mark.parametrize(
    ("state", "form", "layers", "why"),
    [
        ("every-2", "file", 2, None),
        ("every-3", "file", 2, "2 layers of the model can be checkpointed one by one"),
        ("every-2", "script", 2, "a script's own code keeps its activations"),
        ("on", "script", 0, None),
    ],
)
def test_some_layers_need_a_switch_each(state: State, form: str, layers: int, why: str | None) -> None:
    assert why_impossible(state, replace(FACTS, alike_layers=layers), FORMS[form]) == why


def test_a_config_says_whether_inputs_go_to_the_host() -> None:
    assert offloads_inputs(nest_key(INPUTS_ON_HOST, True))
    assert not offloads_inputs({"activation_checkpointing": {"partition_activations": True}})
