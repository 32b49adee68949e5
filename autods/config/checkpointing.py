"""The states of activation checkpointing: off, on, and offload, which is on with the layers' inputs on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from ..devices import find_device
from ..types import Knobs, WorkloadForm
from .deepspeed import get_key

# DeepSpeed's key. Its own code acts only in models that call deepspeed.checkpointing; in those that autods builds, the
# ranks do it, see `rank.checkpointing`.
INPUTS_ON_HOST = "activation_checkpointing.cpu_checkpointing"

State = Literal["off", "on", "offload"]
_WORDS: Mapping[str, State] = {"off": "off", "false": "off", "on": "on", "true": "on", "offload": "offload"}
_SENTENCES: Mapping[State, str] = {  # the leanest last
    "off": "no gradient checkpointing",
    "on": "gradient checkpointing",
    "offload": "gradient checkpointing with layers' inputs on the host",
}


def read_state(value: object) -> State | None:
    """'on', True, 'true' → 'on'; None where the value names no state."""
    return _WORDS.get(str(value).lower())


def offloads_inputs(ds_config: Mapping[str, Any]) -> bool:
    """Whether a model that recomputes its activations keeps the inputs of its layers in pinned host memory."""
    return get_key(ds_config, INPUTS_ON_HOST) is True


def find_state(knobs: Knobs) -> State:
    """Return the state that the knobs ask for."""
    if not knobs.checkpointing:
        return "off"
    return "offload" if knobs.settings.get(INPUTS_ON_HOST) is True else "on"


def is_as_lean(knobs: Knobs, other: Knobs) -> bool:
    """Whether the state of the knobs needs no more memory of the device than that of the others."""
    order = tuple(_SENTENCES)
    return order.index(find_state(knobs)) >= order.index(find_state(other))


def set_state(knobs: Knobs, state: State) -> Knobs:
    """Return the knobs with this state."""
    settings = {key: value for key, value in knobs.settings.items() if key != INPUTS_ON_HOST}
    settings |= {INPUTS_ON_HOST: True} if state == "offload" else {}
    return replace(knobs, checkpointing=state != "off", settings=settings)


def may_offload(knobs: Knobs, form: WorkloadForm, device: str) -> bool:
    """Whether offload may gain where the knobs recompute: CPU ranks have one memory, and a script its own code."""
    return find_state(knobs) == "on" and not form.runs_as_main and not find_device(device).shares_host_memory


def describe_state(knobs: Knobs) -> str:
    """'gradient checkpointing', or that there is none."""
    return _SENTENCES[find_state(knobs)]
