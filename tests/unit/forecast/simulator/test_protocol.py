"""Messages between client and worker survive the wire with their types."""

from __future__ import annotations

from array import array

import pytest

from autods.forecast.simulator.protocol import (
    EngineRequest,
    Failure,
    MeasureRequest,
    Message,
    ModelRequest,
    Ready,
    decode,
    encode,
)
from autods.forecast.values import EngineSpec, Simulation, Trace
from autods.types import ModelFacts

ASK = EngineSpec(
    rung="zero1", ds_config={"zero_optimization": {"stage": 1}}, world_size=8, ranks_per_node=8, device_bytes=80
)
FACTS = ModelFacts(parameters=10, largest_parameter=4, checkpointing=True, tokens_per_sample=None, has_optimizer=False)


@pytest.mark.parametrize(
    "message",
    [
        Ready(pid=7),
        ModelRequest(ranks=2),
        EngineRequest(engine=ASK),
        MeasureRequest(micro_batch=3),
        Failure(kind="engine", problem="AssertionError: no", place="model.py:3", hint="yes"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_survives_the_wire(message: Message) -> None:
    assert decode(encode(message)) == message


def test_facts_of_a_model_survive_the_wire() -> None:
    received = decode(encode(FACTS))
    assert isinstance(received, ModelFacts)
    assert (received.parameters, received.tokens_per_sample) == (10, None)


def test_a_result_survives_the_wire_with_its_traces() -> None:
    trace = Trace(
        events=array("q", [2**40, -1]), marks=((0, "init"), (1, "step")), unrounded=frozenset({0}), emptied=(1,),
        copied=((1, 64),),
    )  # fmt: skip
    result = Simulation(
        micro_batch=2, live_bytes={"step": {"device": 2**40}}, traces={"device": trace}, breakdown={"parameters": 5},
        assumed=("no padding",), seconds=1.5,
    )  # fmt: skip
    assert decode(encode(result)) == result
