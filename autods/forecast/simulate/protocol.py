"""Messages between the simulator's client and worker, and the failures that they carry."""

from __future__ import annotations

import contextlib
import pickle
import re
import socket
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...config.catalogue import Machine
from ...errors import AutodsError
from ...plain_text import clean, read_text
from ...rank.patching import SymbolMissing
from ...system.stacks import find_library_raiser
from ...types import ModelFacts, WorkloadSource
from ...workload.protocol import WorkloadError
from ..values import EngineSpec, Simulation
from .files_read import Stamp

# Messages of torch where code outside of its operators asks for the memory of a tensor without values.
_READS_VALUES = re.compile(r"its data is not allocated yet|'aten::_local_scalar_dense'")
_SIZE_BYTES = 8  # that announce the length of a request


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """Build the model and report its facts; a script sees itself on `ranks` ranks, with this micro batch.

    Both see the card of `machine`; without one, a recent card.
    """

    ranks: int
    micro_batch: int = 1
    machine: Machine | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadReady:
    """The worker has loaded the workload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesWereRead:
    """What the next answer depends on, beside earlier messages of this kind: files by path, as they were then."""

    stamps: Mapping[str, Stamp | None]


class SimulationFailed(AutodsError):
    """A simulation ended without a result. The message is one or two lines for a person.

    `kind` is one of these words:

    `no_compiler`, `build_failed`: the simulated device cannot be built.
    `environment`: torch or DeepSpeed cannot be imported.
    `user_code`: the workload raised an exception.
    `data_dependent`: shapes depend on values.
    `unsupported`: an operator has no fake implementation.
    `engine`: DeepSpeed refused the config.
    `stuck`: the user's code did not come back, or a script did not reach its second step.
    `crashed`: the process died.

    `own_batch` is that of a `WorkloadError`.
    """

    def __init__(
        self,
        kind: str,
        problem: str,
        hint: str | None = None,
        place: str | None = None,
        *,
        own_batch: int | None = None,
    ) -> None:
        self.kind, self.problem, self.hint, self.place, self.own_batch = kind, problem, hint, place, own_batch
        line = f"{place}: {problem}" if place else problem
        super().__init__(f"{line}\n  {hint}" if hint else line)

    def __reduce__(self) -> tuple[type[SimulationFailed], tuple[str | None, ...], dict[str, Any]]:
        """Let pickle call the constructor: the worker sends it, and the client raises it."""
        return SimulationFailed, (self.kind, self.problem, self.hint, self.place), vars(self)


# A process is forked for each request. That of an engine then takes micro batches, as ints, and answers each.
Request = ModelRequest | EngineSpec
Answer = WorkloadReady | FilesWereRead | SimulationFailed | ModelFacts | Simulation


def send(connection: socket.socket, message: Request | Answer | int) -> None:
    """Send the message; a peer that is gone is no error, because the reader sees it."""
    with contextlib.suppress(OSError):
        connection.sendall(pickle.dumps(message))


def send_request(worker: socket.socket, request: Request, connection: socket.socket) -> None:
    """Send a request of any size, and the socket on which it is answered."""
    data = pickle.dumps(request)
    socket.send_fds(worker, [len(data).to_bytes(_SIZE_BYTES)], [connection.fileno()])
    worker.sendall(data)


def receive_request(client: socket.socket) -> tuple[Request, socket.socket] | None:
    """Wait for what `send_request` sends; None when the client is gone."""
    size, descriptors, _, _ = socket.recv_fds(client, _SIZE_BYTES, 1)
    if not size:
        return None
    request: Request = pickle.loads(client.recv(int.from_bytes(size), socket.MSG_WAITALL))
    return request, socket.socket(fileno=descriptors[0])


def receive(connection: socket.socket) -> Generator[Any, None, None]:
    """Yield the messages of the peer, until it is gone. Both ends are processes of one user, so pickle is safe."""
    with connection.makefile("rb") as stream, contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
        while True:
            yield pickle.load(stream)


@contextlib.contextmanager
def explain_optimizer_errors(config: Mapping[str, Any]) -> Iterator[None]:
    """Turn errors of `deepspeed.initialize` or of a step about the config's optimizer into `SimulationFailed`."""
    try:
        yield
    except Exception as error:
        message = read_text(error).lower()
        name = (config.get("optimizer") or {}).get("type")
        optimizer = f"the optimizer {name}" if name else "the optimizer of build_optimizer"
        for error_type, part, kind, problem, hint in (
            (
                AssertionError, "untested zero optimizer",
                "engine", f"DeepSpeed has not tested ZeRO with {optimizer}, and refuses it",
                'add "zero_allow_untested_optimizer": true to the config, or use Adam, AdamW, Adagrad or Lion',
            ),
            (
                Exception, "cget_managed_ptr",
                "unsupported", f"{optimizer} is a paged one of bitsandbytes: its states move between the GPU and the"
                " host, which is not simulated",
                "use the optimizer of the same name without Paged, or measure by a trial (autods fit)",
            ),
            (
                ValueError, "had not been implemented on cpu backend",
                "engine", f"DeepSpeed's kernel of {optimizer} runs on GPUs only", "use AdamW on CPU ranks",
            ),
            (
                AttributeError, f"has no attribute '{str(name).lower()}'",
                "engine", f"optimizer.type {name!r} is neither an optimizer of DeepSpeed nor of torch.optim",
                "mind the case: torch's are written as in torch.optim (SGD, Adafactor)",
            ),
        ):  # fmt: skip
            if isinstance(error, error_type) and part in message:
                raise SimulationFailed(kind, problem, hint) from error
        raise


_OF_A_CONFIG = "the model of {} raises it: check that config's values, or install what the message names"


def failure_of(error: BaseException, source: WorkloadSource) -> SimulationFailed:
    """The failure that an exception means; `place` is the user's innermost line, else that of the model's library.

    A config has no lines, so its failure in a library names the config in the hint.
    """
    if isinstance(error, SimulationFailed):
        return error
    if isinstance(error, SymbolMissing):
        problem, _, advice = read_text(error).partition("\n")
        return SimulationFailed(kind="engine", problem=problem, hint=advice.strip())
    from ...diagnosis.signatures import find_signature
    from ...rank.record import describe_error

    if isinstance(error, WorkloadError) and error.place:
        return SimulationFailed(kind="user_code", problem=clean(error.problem), place=error.place, hint=error.hint)
    described = describe_error(error, source.path)
    types, message = described.types, " ".join(described.message.split())
    message = message.partition(" This could be because")[0][:300]  # torch lists all backends of an operator
    place = described.user_frame
    if described.contract:
        return SimulationFailed(kind="user_code", problem=described.contract, place=place, hint=described.hint)
    kind, hint = "user_code" if place else "engine", None
    if {"DataDependentOutputException", "DynamicOutputShapeException", "NoValues"} & set(types):
        kind, hint = "data_dependent", "compute it without looking at values, or forecast with --no-forecast"
    elif "UnsupportedOperatorException" in types:
        kind, hint = "unsupported", "register a fake implementation with torch.library.register_fake"
    elif "expected scalar type" in message and kind == "engine":
        hint = (
            "the model's buffers, which DeepSpeed leaves in fp32, or its code made an input of another type than the"
            ' weights: give --precision fp32, or for buffers "data_types": {"buffer_dtype": "bf16"} in the base config'
        )
    elif kind == "engine" and (row := find_signature(message, type=types[0])) is not None and row.file == "config":
        hint = row.advice
    if place is None and (library := find_library_raiser(error)) is not None and "/deepspeed/" not in library.file:
        place = str(library)
    problem = f"{types[0]}: {message}" if message else types[0]
    if _READS_VALUES.search(message):
        kind, problem = "data_dependent", "a library reads values of tensors, which are not computed there"
    elif kind == "engine" and hint is None and place is not None and source.form.is_model_config:
        hint = _OF_A_CONFIG.format(source.path)
    if "SystemExit" in types:
        problem, hint = f"sys.exit({message}) was called", "a workload must not leave the process"
    return SimulationFailed(kind=kind, problem=problem, place=place, hint=hint)
