"""The prepared process: it loads torch, DeepSpeed and the workload on the simulated device, and forks engines.

Engines that start from the same model are forked from a child that has built it. The client starts this module as
`python -m autods.forecast.simulate.worker FD cuda|cpu SOURCE SCRATCH`; `protocol` describes the messages.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import json
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from os import _exit  # the workload may replace it
from typing import TYPE_CHECKING, NoReturn

from ...devices import CUDA, Device, find_device
from ...errors import describe_failed_import
from ...rank.patching import SymbolMissing
from ...system import processes, stacks
from ...types import WorkloadSource
from ..values import EngineSpec
from .protocol import Answer, Request, SimulationRefused, WorkloadReady, failure_of, receive, send

if TYPE_CHECKING:
    from ...workload.protocol import Workload
    from .engine import BuiltModel, SimulationContext

_LONGEST_REQUEST = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What this process has loaded, and its children inherit. A script has no workload; `model` is built in a child."""

    context: SimulationContext
    source: WorkloadSource
    scratch: str
    workload: Workload | None = None
    model: BuiltModel | None = None


def main(argv: list[str]) -> None:
    """Serve until the client is gone."""
    client, device = socket.socket(fileno=int(argv[0])), argv[1]
    source, scratch = WorkloadSource(**json.loads(argv[2])), argv[3]
    stacks.answer_requests()  # the client asks where a long simulation is
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client handles Ctrl-C, and closes the socket
    faulthandler.enable()
    try:
        with processes.die_with_peer(client):
            prepared = _prepare(find_device(device), source, scratch, client)
    except BaseException as error:
        send(client, failure_of(error, source.path))
        return
    send(client, WorkloadReady())
    _serve(client, prepared)
    shutil.rmtree(scratch, ignore_errors=True)  # for a client that was killed


def _prepare(device: Device, source: WorkloadSource, scratch: str, client: socket.socket) -> _Prepared:
    gc.disable()  # nearly all objects that imports make stay alive, so a search for garbage finds next to nothing
    accelerator = CUDA if device.has_cards else device  # the simulated GPU is one of CUDA
    os.environ.update(DS_ACCELERATOR=accelerator.name, DS_IGNORE_CUDA_DETECTION="1", CUDA_VISIBLE_DEVICES="")
    try:
        _import_libraries(device)
    except (SimulationRefused, SymbolMissing):
        raise
    except Exception as error:  # nothing of the user's was imported on purpose so far
        raise SimulationRefused("environment", *describe_failed_import(error).split("\n  ")) from error
    from ...rank import preload
    from ...workload.load import in_one_process, load
    from .engine import SimulationContext

    context = SimulationContext(device)
    workload = None
    if source.form.runs_as_main:
        preload.preload_trainer(source)
    else:
        with in_one_process(lambda error: send(client, failure_of(error, source.path))):
            workload = load(source)
    gc.freeze()
    gc.enable()
    return _Prepared(context, source, scratch, workload)


def _import_libraries(device: Device) -> None:
    """Import torch and DeepSpeed, with the simulated GPU below them where that is asked for."""
    if device.has_cards:
        from .gpu_library import load as load_library

        library = load_library()
        import torch  # noqa: F401  # a CUDA build installs its own guard

        library.autods_register_guard()
        library.autods_answer_for_devices()
    from ...rank import preload

    nvml = sys.modules.get("pynvml")
    sys.modules["pynvml"] = None  # type: ignore[assignment]  # DeepSpeed would open the driver of this machine
    preload.preload()
    del sys.modules["pynvml"]
    if nvml is not None:
        sys.modules["pynvml"] = nvml
    # Torch replaces its thread pool in a child at the pool's first use (caffe2/utils/threadpool/pthreadpool-cpp.cc).
    # The threads of the first backward pass would race for it, and one aborts with "Invalid thread pool!".
    os.register_at_fork(after_in_child=_use_one_thread)


def _use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _serve(client: socket.socket, prepared: _Prepared) -> None:
    """Fork a process for each request, until the client is gone.

    Engines that can share a model come from a child that has built it. It is forked for the first of them, and their
    requests are passed on to it.
    """
    parent = os.getpid()
    children: set[int] = set()
    builders: dict[tuple[object, ...], socket.socket] = {}
    while True:
        line, descriptors, _, _ = socket.recv_fds(client, _LONGEST_REQUEST, 1)
        if not line:
            break
        children = {pid for pid in children if not _has_ended(pid)}
        request, connection = pickle.loads(line), socket.socket(fileno=descriptors[0])
        shared = _shared_model(request, prepared)
        if shared in builders and _pass_on(builders[shared], line, connection):
            connection.close()
            continue
        builder_end = None
        if shared is not None:  # the child that has built this model is not there yet, or has died
            builders[shared], builder_end = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            processes.die_with_parent(parent)
            for other in (client, *builders.values()):
                other.close()
            if builder_end is None:
                _answer_requests(connection, request, prepared)
            connection.close()
            _build_and_serve(builder_end, request, prepared)
        children.add(pid)
        if shared is not None and builder_end is not None:
            builder_end.close()
            _pass_on(builders[shared], line, connection)
        connection.close()
    for pid in children:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:  # the workload ignores SIGCHLD
        return True


def _shared_model(request: Request, prepared: _Prepared) -> tuple[object, ...] | None:
    """A key that is equal for engines that can share a built model; None if the engine must be forked here.

    Under zero.Init DeepSpeed takes part in building the model, as the rung's config says. A script builds for itself.
    """
    if not isinstance(request, EngineSpec) or prepared.model is not None or prepared.source.form.runs_as_main:
        return None
    if request.zero_init:
        return None
    return request.world_size, request.ranks_per_node, request.device_bytes, request.checkpointing


def _pass_on(builder: socket.socket, line: bytes, connection: socket.socket) -> bool:
    """Send a request to the child that has built its model; False if that child is gone."""
    try:
        socket.send_fds(builder, [line], [connection.fileno()])
    except OSError:
        return False
    return True


def _build_and_serve(client: socket.socket, spec: EngineSpec, prepared: _Prepared) -> NoReturn:
    """The life of a child that builds the model which engines share, and forks them."""
    faulthandler.enable()
    from ...rank import preload
    from ...workload.load import in_one_process
    from .engine import BuiltModel

    def serve(model: BuiltModel) -> None:
        try:
            preload.freeze()
            _serve(client, replace(prepared, model=model))
        except BaseException:
            traceback.print_exc()
        _end()

    pid = os.getpid()

    def fail(error: BaseException) -> None:
        os.kill(pid, signal.SIGKILL)  # this process takes over
        serve(BuiltModel.failed(error))

    try:
        assert prepared.workload is not None
        with in_one_process(fail):
            model = BuiltModel(prepared.context, prepared.workload, spec)
    except BaseException:
        traceback.print_exc()
        _end()
    serve(model)
    _end()


def _end() -> NoReturn:
    """End this process without its parent's buffers and clean-ups. The workload may have replaced the streams."""
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    _exit(0)


def _answer_requests(connection: socket.socket, request: Request, prepared: _Prepared) -> NoReturn:
    """The life of a process that forks engines of one spec, or of one that looks at the model."""
    faulthandler.enable()
    from .engine import RankEngine, look_at_model

    context, source, workload = prepared.context, prepared.source, prepared.workload
    with tempfile.TemporaryDirectory(dir=prepared.scratch) as scratch:
        try:
            os.chdir(scratch)
            if workload is None:
                from . import script_engine

                script_engine.answer_requests(connection, request, context, source, scratch)
            elif isinstance(request, EngineSpec):
                engine = RankEngine(context, workload, request, scratch, prepared.model)
                initialized = False
                for micro_batch in receive(connection):
                    initialized = initialized or _answer(connection, source, engine.initialize)
                    if not initialized:
                        break
                    # Each in a fork of its own: the answer does not depend on the sizes before it.
                    if not _answer_in_fork(connection, source, functools.partial(engine.measure, micro_batch)):
                        break
            else:
                _answer(connection, source, lambda: look_at_model(context, workload))
        except BaseException:
            traceback.print_exc()
    _end()


def _answer_in_fork(connection: socket.socket, source: WorkloadSource, work: Callable[[], Answer]) -> bool:
    """Do the work in a child, which sends its result or the failure; whether it went well."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        went_well = False
        try:
            processes.die_with_parent(parent)
            went_well = _answer(connection, source, work)
        finally:
            with contextlib.suppress(Exception):
                sys.stderr.flush()
            _exit(0 if went_well else 1)
    return os.waitpid(pid, 0)[1] == 0


def _answer(connection: socket.socket, source: WorkloadSource, work: Callable[[], Answer | None]) -> bool:
    """Do the work and send its result, if it has any, or the failure; whether it went well."""
    from ...workload.load import in_one_process

    def report(error: BaseException) -> None:
        send(connection, failure_of(error, source.path))

    try:
        with processes.die_with_peer(connection), in_one_process(report):
            answer = work()
    except BaseException as error:
        with contextlib.suppress(Exception):  # its methods are the workload's
            traceback.print_exc()
        report(error)
        return False
    if answer is not None:
        send(connection, answer)
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
