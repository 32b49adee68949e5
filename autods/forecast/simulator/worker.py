"""The prepared process: torch, DeepSpeed and the workload loaded once on the simulated device; it forks an engine each.

Started by `client` as `python -m autods.forecast.simulator.worker FD cuda|cpu SOURCE`. On the socket it says
{"ready": …} once; then each line comes with the descriptor of a socket on which the new engine speaks:
{"engine": ask} or {"facts": true}, and on that socket {"measure": micro batch} → {"simulated": …} | {"failed": …}.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import json
import os
import select
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from ...values import WorkloadSource
from ..values import Ask

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Serve until the client is gone."""
    client, device = socket.socket(fileno=int(argv[0])), argv[1]
    source = WorkloadSource(**json.loads(argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the client's to handle; it closes the socket
    try:
        stage, workload = _prepare(device, source)
    except BaseException as error:
        _say(client, {"failed": _told(error, source.path)})
        return
    _say(client, {"ready": os.getpid()})
    children: set[int] = set()
    poll = select.poll()
    poll.register(client, select.POLLIN | select.POLLHUP)
    while True:
        if not poll.poll(200 if children else None):
            _reap(children)
            continue
        line, descriptors, _, _ = socket.recv_fds(client, 1 << 20, 1)
        if not line:
            break
        own = socket.socket(fileno=descriptors[0])
        pid = os.fork()
        if pid == 0:
            client.close()
            _live(own, json.loads(line), stage, workload, source)
        own.close()
        children.add(pid)
    for pid in children:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _prepare(device: str, source: WorkloadSource) -> tuple[Any, Any]:
    os.environ.update(DS_ACCELERATOR=device, DS_IGNORE_CUDA_DETECTION="1", CUDA_VISIBLE_DEVICES="")
    if device == "cuda":
        from .library import load as load_library

        library = load_library()
        import torch

        library.autods_register_guard()
        real, torch.cuda.is_available = torch.cuda.is_available, lambda: False  # DeepSpeed looks for nvcc at import
    from ...trial import preload

    preload.preload()
    if device == "cuda":
        torch.cuda.is_available = real
    from ...workload import load
    from .engine import Stage

    stage = Stage(cpu=device == "cpu")
    workload = load(source)
    preload.settle()
    return stage, workload


def _live(own: socket.socket, job: dict[str, Any], stage: Any, workload: Any, source: WorkloadSource) -> None:
    """The life of one engine's process. Never returns."""
    faulthandler.enable()
    _die_with_parent()
    from .engine import Engine, look

    with tempfile.TemporaryDirectory(prefix="autods-simulated-") as scratch:
        try:
            os.chdir(scratch)
            if "facts" in job:
                _answer(own, source, lambda: {"facts": look(stage, workload)})
            else:
                engine = Engine(stage, workload, Ask(**job["engine"]), scratch)
                for line in own.makefile():
                    micro_batch = int(json.loads(line)["measure"])
                    if not _answer(own, source, lambda: {"simulated": engine.measure(micro_batch)}):  # noqa: B023
                        break
        except BaseException:
            traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)


def _answer(own: socket.socket, source: WorkloadSource, work: Callable[[], dict[str, Any]]) -> bool:
    try:
        with _ends_with(own):
            said = work()
    except BaseException as error:
        traceback.print_exc()
        said = {"failed": _told(error, source.path)}
    _say(own, said)
    return "failed" not in said


@contextlib.contextmanager
def _ends_with(own: socket.socket) -> Iterator[None]:
    """Die at once when the client hangs up, though this process is too busy to look. It says nothing meanwhile."""
    flags = fcntl.fcntl(own, fcntl.F_GETFL) & ~os.O_ASYNC
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, fcntl.F_SETFL, flags | os.O_ASYNC)  # SIGIO, whose default is death
    try:
        yield
    finally:
        fcntl.fcntl(own, fcntl.F_SETFL, flags)


def _told(error: BaseException, user_file: str) -> dict[str, Any]:
    """An exception as kind, what, where, mend."""
    from .library import NoLibrary

    if isinstance(error, NoLibrary):
        return {"kind": error.kind, "what": error.what, "where": None, "mend": error.mend}
    from ...trial.rank import describe

    told = describe(error, user_file)
    names, message = told["types"], " ".join(str(told["message"]).split())[:500]
    if told["contract"]:
        return {"kind": "user_code", "what": told["contract"], "where": told["user_frame"], "mend": told["mend"]}
    data = {"DataDependentOutputException", "DynamicOutputShapeException", "NoValues"} & set(names)
    if data:
        kind, mend = "data_dependent", "compute it without looking at values, or forecast with --no-forecast"
    elif "UnsupportedOperatorException" in names:
        kind, mend = "unsupported", "register a fake implementation with torch.library.register_fake"
    elif told["user_frame"]:
        kind, mend = "user_code", None
    else:
        kind, mend = "engine", None
    return {"kind": kind, "what": f"{names[0]}: {message}", "where": told["user_frame"], "mend": mend}


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _reap(children: set[int]) -> None:
    for pid in list(children):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                continue
        children.discard(pid)


def _say(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the client may be gone; the main loop sees it
        connection.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
