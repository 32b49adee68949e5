"""Messages between client and worker survive the wire with their types."""

from __future__ import annotations

import itertools
import socket
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from autods.forecast.simulate.protocol import (
    Answer,
    ModelRequest,
    Request,
    SimulationFailed,
    WorkloadReady,
    receive,
    receive_request,
    send,
    send_request,
)
from autods.forecast.values import EngineSpec, Simulation, Trace
from autods.types import ModelFacts

SPEC = EngineSpec(
    rung="zero1", ds_config={"zero_optimization": {"stage": 1}}, world_size=8, ranks_per_node=8, device_bytes=80
)
FACTS = ModelFacts(parameters=10, largest_parameter=4, checkpointing=True, tokens_per_sample=None, has_optimizer=False)
TRACE = Trace(
    events=array("q", [2**40, -1]), marks=((0, "init"), (1, "step")), unrounded=frozenset({0}), emptied=(1,),
    copied=((1, 64),),
)  # fmt: skip
RESULT = Simulation(
    micro_batch=2, live_bytes={"step": {"device": 2**40}}, traces={"device": TRACE}, breakdown={"parameters": 5},
    assumed=("no padding",), seconds=1.5,
)  # fmt: skip


Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize(
    "message",
    [
        WorkloadReady(), ModelRequest(ranks=2), SPEC, FACTS, RESULT,
    ],
    ids=lambda message: type(message).__name__,
)  # fmt: skip
def test_a_message_survives_the_wire(message: Request | Answer, pair: Pair) -> None:
    ours, theirs = pair
    send(ours, message)
    assert next(receive(theirs)) == message


def test_a_failure_survives_the_wire(pair: Pair) -> None:
    ours, theirs = pair
    failed = SimulationFailed("engine", "AssertionError: no", "yes", place="model.py:3")
    send(ours, failed)
    (received,) = itertools.islice(receive(theirs), 1)
    assert (vars(received), str(received)) == (vars(failed), str(failed))


def test_messages_end_with_the_peer(pair: Pair) -> None:
    ours, theirs = pair
    for micro_batch in (1, 2):
        send(ours, micro_batch)
    ours.sendall(b"\x80\x05torn")
    ours.close()
    assert list(receive(theirs)) == [1, 2]


def test_a_message_to_a_peer_that_is_gone_is_dropped(pair: Pair) -> None:
    ours, theirs = pair
    theirs.close()
    send(ours, 1)


@pytest.mark.parametrize("size", [1, 10_000_000])
def test_a_request_of_any_size_arrives_with_its_socket(size: int) -> None:
    client, worker = socket.socketpair()
    ours, theirs = socket.socketpair()
    request = ModelRequest(ranks="x" * size)  # type: ignore[arg-type]
    with client, worker, ours, ThreadPoolExecutor(1) as pool:
        received = pool.submit(receive_request, worker)
        with theirs:
            send_request(client, request, theirs)
        answer = received.result(timeout=60)
        assert answer is not None
        assert answer[0] == request
        answer[1].sendall(b"x")
        assert ours.recv(1) == b"x"
        answer[1].close()
        client.close()
        assert receive_request(worker) is None
