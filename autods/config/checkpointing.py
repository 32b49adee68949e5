"""The states of activation checkpointing: off, on, every k-th layer, and on with the layers' inputs on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from ..devices import find_device
from ..types import Knobs, ModelFacts, WorkloadForm
from .deepspeed import get_key

# DeepSpeed's key. Its own code acts only in models that call deepspeed.checkpointing; in those that autods builds, the
# ranks do it, see `rank.checkpointing`.
INPUTS_ON_HOST = "activation_checkpointing.cpu_checkpointing"

State = Literal["off", "every-4", "every-3", "every-2", "on", "offload"]
_SENTENCES: Mapping[State, str] = {  # the leanest last
    "off": "no gradient checkpointing",
    "every-4": "gradient checkpointing of every 4th layer",
    "every-3": "gradient checkpointing of every 3rd layer",
    "every-2": "gradient checkpointing of every 2nd layer",
    "on": "gradient checkpointing",
    "offload": "gradient checkpointing with layers' inputs on the host",
}
STATES: tuple[State, ...] = tuple(_SENTENCES)
PARTIAL: Mapping[State, int] = {"every-2": 2, "every-3": 3, "every-4": 4}  # layers of which one is recomputed
_WORDS: Mapping[str, State] = {"false": "off", "true": "on", **{state: state for state in STATES}}


def read_state(value: object) -> State | None:
    """'on', True, 'true' → 'on'; None where the value names no state."""
    return _WORDS.get(str(value).lower())


def offloads_inputs(ds_config: Mapping[str, Any]) -> bool:
    """Whether a model that recomputes its activations keeps the inputs of its layers in pinned host memory."""
    return get_key(ds_config, INPUTS_ON_HOST) is True


def find_state(knobs: Knobs) -> State:
    """Return the state that the knobs ask for."""
    return name_state(knobs.checkpointing, on_host=knobs.settings.get(INPUTS_ON_HOST) is True)


def name_state(checkpointing: bool | int, *, on_host: bool = False) -> State:
    """Return the state of a `checkpointing` as knobs, engines and jobs have it."""
    if not checkpointing:
        return "off"
    partial = next((state for state, every in PARTIAL.items() if every == checkpointing), None)
    return partial or ("offload" if on_host else "on")


def make_knob(state: State) -> bool | int:
    """Return the `checkpointing` of knobs, engines and jobs in this state: the inverse of `name_state`."""
    return PARTIAL.get(state, state != "off")


def works_in_scripts(state: State) -> bool:
    """Whether a script's model can be brought into this state; its own code keeps the activations."""
    return state in ("off", "on")


def is_as_lean(knobs: Knobs, other: Knobs) -> bool:
    """Whether the state of the knobs needs no more memory of the device than that of the others."""
    return STATES.index(find_state(knobs)) >= STATES.index(find_state(other))


def set_state(knobs: Knobs, state: State) -> Knobs:
    """Return the knobs with this state."""
    settings = {key: value for key, value in knobs.settings.items() if key != INPUTS_ON_HOST}
    settings |= {INPUTS_ON_HOST: True} if state == "offload" else {}
    return replace(knobs, checkpointing=make_knob(state), settings=settings)


def why_impossible(state: State, facts: ModelFacts, form: WorkloadForm) -> str | None:
    """Return why a workload cannot be trained in this state; None when it can."""
    if state != "off" and not facts.checkpointing:
        return "the model has no gradient_checkpointing_enable()"
    if form.runs_as_main and not works_in_scripts(state):
        return "a script's own code keeps its activations"
    if PARTIAL.get(state, 1) > max(1, facts.alike_layers):
        return f"{facts.alike_layers} layers of the model can be checkpointed one by one"
    return None


def may_offload(knobs: Knobs, form: WorkloadForm, device: str) -> bool:
    """Whether offload may gain where the knobs recompute: CPU ranks have one memory, and a script its own code."""
    return find_state(knobs) == "on" and not form.runs_as_main and not find_device(device).shares_host_memory


def describe_state(knobs: Knobs) -> str:
    """'gradient checkpointing', or that there is none."""
    return _SENTENCES[find_state(knobs)]
