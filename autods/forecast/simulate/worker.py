"""The prepared process: it loads torch, DeepSpeed and the workload on the simulated device, and forks engines.

The client starts this module as `python -m autods.forecast.simulate.worker FD cuda|cpu SOURCE SCRATCH [TMPDIR]`, where
the last is a session's own; `protocol` describes the messages.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from os import _exit  # the workload may replace it
from typing import TYPE_CHECKING, NoReturn

from ...devices import CUDA, Device, find_device
from ...errors import describe_failed_import
from ...rank.patching import SymbolMissing
from ...system import processes, stacks
from ...types import WorkloadSource
from ..values import EngineSpec
from .files_read import FilesRead
from .protocol import (
    Answer,
    FilesWereRead,
    Request,
    SimulationFailed,
    WorkloadReady,
    failure_of,
    receive,
    receive_request,
    send,
)

if TYPE_CHECKING:
    from ...workload.protocol import Workload
    from .engine import SimulationContext


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What this process has loaded, and its children inherit. A script has no workload."""

    context: SimulationContext
    source: WorkloadSource
    scratch: str
    files: FilesRead
    workload: Workload | None = None

    def tell_files(self, connection: socket.socket) -> None:
        """Send what was read since the last time, before an answer that depends on it. A script's are not stored."""
        if not self.source.form.runs_as_main:
            send(connection, FilesWereRead(stamps=self.files.collect()))


def main(argv: list[str]) -> None:
    """Serve until the client is gone."""
    client, device = socket.socket(fileno=int(argv[0])), argv[1]
    source, scratch = WorkloadSource(**json.loads(argv[2])), argv[3]
    stacks.answer_requests()  # the client asks where a long simulation is
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client handles Ctrl-C, and closes the socket
    faulthandler.enable()
    try:
        with processes.die_with_peer(client):
            # A pickled workload is written for each command, and named by its content.
            files = FilesRead(*argv[3:], *([source.path] if source.kind == "pickle" else []))
            prepared = _prepare(find_device(device), source, scratch, files, client)
    except BaseException as error:
        send(client, failure_of(error, source))
        return
    prepared.tell_files(client)
    send(client, WorkloadReady())
    _serve(client, prepared)
    shutil.rmtree(scratch, ignore_errors=True)  # for a client that was killed


def _prepare(
    device: Device, source: WorkloadSource, scratch: str, files: FilesRead, client: socket.socket
) -> _Prepared:
    gc.disable()  # nearly all objects that imports make stay alive, so a search for garbage finds next to nothing
    accelerator = CUDA if device.has_cards else device  # the simulated GPU is one of CUDA
    os.environ.update(DS_ACCELERATOR=accelerator.name, DS_IGNORE_CUDA_DETECTION="1", CUDA_VISIBLE_DEVICES="")
    # transformers would compare values that simulated tensors lack, such as the number of a batch's image tokens.
    os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = "1"
    if not source.form.runs_as_main:
        files.listen()
    try:
        _import_libraries(device)
    except (SimulationFailed, SymbolMissing):
        raise
    except Exception as error:  # nothing of the user's was imported on purpose so far
        raise SimulationFailed("environment", *describe_failed_import(error).split("\n  ")) from error
    from ...rank import preload
    from ...workload.load import in_one_process, load
    from .engine import SimulationContext

    context = SimulationContext(device)
    workload = None
    if source.form.runs_as_main:
        preload.preload_trainer(source)
    else:
        with in_one_process(lambda error: send(client, failure_of(error, source))):
            workload = load(source)
    gc.freeze()
    gc.enable()
    return _Prepared(context, source, scratch, files, workload)


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
    """Fork a process for each request, until the client is gone."""
    parent = os.getpid()
    children: set[int] = set()
    while True:
        if (received := receive_request(client)) is None:
            break
        children = {pid for pid in children if not _has_ended(pid)}
        request, connection = received
        pid = os.fork()
        if pid == 0:
            processes.die_with_parent(parent)
            client.close()
            _answer_requests(connection, request, prepared)
        children.add(pid)
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


def _answer_requests(connection: socket.socket, request: Request, prepared: _Prepared) -> NoReturn:
    """The life of a process that builds an engine and forks its micro batches, or of one that looks at the model."""
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
                engine = RankEngine(context, workload, request, scratch)
                initialized = False
                for micro_batch in receive(connection):
                    initialized = initialized or _answer(connection, prepared, engine.initialize)
                    if not initialized:
                        break
                    # Each in a fork of its own: the answer does not depend on the sizes before it.
                    if not _answer_in_fork(connection, prepared, functools.partial(engine.measure, micro_batch)):
                        break
            else:
                _answer(connection, prepared, lambda: look_at_model(context, workload, request.machine))
        except BaseException:
            traceback.print_exc()
    with contextlib.suppress(Exception):  # the workload may have replaced the stream
        sys.stderr.flush()
    _exit(0)  # without the parent's buffers and clean-ups


def _answer_in_fork(connection: socket.socket, prepared: _Prepared, work: Callable[[], Answer]) -> bool:
    """Do the work in a child, which sends its result or the failure; whether it went well."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        went_well = False
        try:
            processes.die_with_parent(parent)
            went_well = _answer(connection, prepared, work)
        finally:
            with contextlib.suppress(Exception):
                sys.stderr.flush()
            _exit(0 if went_well else 1)
    return os.waitpid(pid, 0)[1] == 0


def _answer(connection: socket.socket, prepared: _Prepared, work: Callable[[], Answer | None]) -> bool:
    """Do the work and send its result, if it has any, or the failure; whether it went well."""
    from ...workload.load import in_one_process

    def report(error: BaseException) -> None:
        send(connection, failure_of(error, prepared.source))

    try:
        with processes.die_with_peer(connection), in_one_process(report):
            answer = work()
    except BaseException as error:
        with contextlib.suppress(Exception):  # its methods are the workload's
            traceback.print_exc()
        report(error)
        return False
    if answer is not None:
        prepared.tell_files(connection)
        send(connection, answer)
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
