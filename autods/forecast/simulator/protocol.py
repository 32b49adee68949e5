"""The messages between the simulator's client and its worker: typed values, one line of JSON each. No torch.

The worker sends `Ready` or `Failure` once. The client answers with `ModelRequest` or `EngineRequest`, each with the
descriptor of a socket for the new process. On that socket a model's process sends `ModelFacts`; an engine's process
answers each `MeasureRequest` with `Simulation`. Either sends `Failure` instead when it fails.
"""

from __future__ import annotations

import base64
import contextlib
import json
import socket
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...types import ModelFacts
from ..values import EngineSpec, Simulation, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """Build the model and report its facts; a script sees itself on `ranks` ranks."""

    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """Start a process for this engine, which then waits for `MeasureRequest`s."""

    engine: EngineSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureRequest:
    """Run this micro batch on the engine."""

    micro_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The worker has loaded the workload."""

    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The simulation failed: the fields of `client.SimulationFailed`."""

    kind: str
    what: str
    where: str | None = None
    hint: str | None = None


Message = ModelRequest | EngineRequest | MeasureRequest | Ready | Failure | ModelFacts | Simulation
_TYPES: Mapping[str, type[Any]] = {
    message.__name__: message
    for message in (ModelRequest, EngineRequest, MeasureRequest, Ready, Failure, ModelFacts, Simulation)
}


def encode(message: Message) -> bytes:
    """The message as a line of JSON with its type."""
    if isinstance(message, Simulation):
        traces = {tier: _trace_to_json(trace) for tier, trace in message.traces.items()}
        fields = {name: getattr(message, name) for name in Simulation.__slots__} | {"traces": traces}
    else:
        fields = asdict(message)
    return json.dumps({"type": type(message).__name__, **fields}).encode() + b"\n"


def decode(line: bytes | str) -> Message:
    """The message of a line that `encode` made."""
    fields: dict[str, Any] = json.loads(line)
    kind = _TYPES[fields.pop("type")]
    if kind is EngineRequest:
        fields["engine"] = EngineSpec(**fields["engine"])
    elif kind is Simulation:
        fields["traces"] = {tier: _trace_from_json(trace) for tier, trace in fields["traces"].items()}
        fields["assumed"] = tuple(fields["assumed"])
    message: Message = kind(**fields)
    return message


def send(connection: socket.socket, message: Message) -> None:
    """Send the message; a peer that is gone is no error, because the reader sees it."""
    with contextlib.suppress(OSError):
        connection.sendall(encode(message))


def _trace_to_json(trace: Trace) -> dict[str, Any]:
    return {
        "events": base64.b64encode(array("q", trace.events).tobytes()).decode(),
        "marks": trace.marks,
        "unrounded": sorted(trace.unrounded),
        "emptied": trace.emptied,
        "copied": trace.copied,
    }


def _trace_from_json(fields: Mapping[str, Any]) -> Trace:
    return Trace(
        events=array("q", base64.b64decode(fields["events"])),
        marks=tuple((count, phase) for count, phase in fields["marks"]),
        unrounded=frozenset(fields["unrounded"]),
        emptied=tuple(fields["emptied"]),
        copied=tuple((count, size) for count, size in fields["copied"]),
    )
