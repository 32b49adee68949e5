"""Messages between the simulator's client and worker, and the failures that they carry."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...trial.patching import SymbolMissing
from ...types import ModelFacts
from ..values import EngineSpec, Simulation, Trace


class Refused(Exception):
    """The simulation cannot or must not go on; the fields are those of `protocol.Failure`."""

    def __init__(self, kind: str, problem: str, hint: str | None = None) -> None:
        super().__init__(problem)
        self.kind, self.problem, self.hint = kind, problem, hint


def unsupported(problem: str, hint: str | None = None) -> Refused:
    """The error for code with unknown memory use: no forecast is better than a wrong one."""
    return Refused("unsupported", problem, hint or "forecast with --no-forecast, or measure by a trial (autods fit)")


@contextlib.contextmanager
def explain_optimizer_errors(config: Mapping[str, Any]) -> Iterator[None]:
    """Turn errors of `deepspeed.initialize` or of a step about the config's optimizer into `Refused`."""
    try:
        yield
    except Exception as error:
        message = str(error)
        name = (config.get("optimizer") or {}).get("type")
        optimizer = f"the optimizer {name}" if name else "the optimizer of build_optimizer"
        if isinstance(error, AssertionError) and "untested ZeRO Optimizer" in message:
            raise Refused(
                "engine",
                f"DeepSpeed has not tested ZeRO with {optimizer}, and refuses it",
                'add "zero_allow_untested_optimizer": true to the config, or use Adam, AdamW, Adagrad or Lion',
            ) from error
        if "cget_managed_ptr" in message:
            raise unsupported(
                f"{optimizer} is a paged one of bitsandbytes: its states move between the GPU and the host, which is"
                " not simulated",
                "use the optimizer of the same name without Paged, or measure by a trial (autods fit)",
            ) from error
        if isinstance(error, ValueError) and "had not been implemented on CPU backend" in message:
            raise Refused(
                "engine", f"DeepSpeed's kernel of {optimizer} runs on GPUs only", "use AdamW on CPU ranks"
            ) from error
        if name and isinstance(error, AttributeError) and f"has no attribute '{name.lower()}'" in message.lower():
            raise Refused(
                "engine",
                f"optimizer.type {name!r} is neither an optimizer of DeepSpeed nor of torch.optim",
                "mind the case: torch's are written as in torch.optim (SGD, Adafactor)",
            ) from error
        raise


def failure_of(error: BaseException, user_file: str) -> Failure:
    """The failure that an exception means; `place` is the innermost line of the user's file."""
    if isinstance(error, Refused):
        return Failure(kind=error.kind, problem=error.problem, hint=error.hint)
    if isinstance(error, SymbolMissing):
        problem, _, advice = str(error).partition("\n")
        return Failure(kind="engine", problem=problem, hint=advice.strip())
    from ...trial.job import describe_error

    described = describe_error(error, user_file)
    types, message = described["types"], " ".join(str(described["message"]).split())[:500]
    place = described["user_frame"]
    if described["contract"]:
        return Failure(kind="user_code", problem=described["contract"], place=place, hint=described["hint"])
    kind, hint = "user_code" if place else "engine", None
    if {"DataDependentOutputException", "DynamicOutputShapeException", "NoValues"} & set(types):
        kind, hint = "data_dependent", "compute it without looking at values, or forecast with --no-forecast"
    elif "UnsupportedOperatorException" in types:
        kind, hint = "unsupported", "register a fake implementation with torch.library.register_fake"
    return Failure(kind=kind, problem=f"{types[0]}: {message}", place=place, hint=hint)


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
    problem: str
    place: str | None = None
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
