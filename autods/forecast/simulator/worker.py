"""The prepared process: torch, DeepSpeed and the workload loaded once on the simulated device; it forks an engine each.

Engines that start from the same model share a child that has built it.
Started by `client` as `python -m autods.forecast.simulator.worker FD cuda|cpu SOURCE SCRATCH`. On the socket it says
{"ready": …} once; then each line comes with the descriptor of a socket on which the new engine speaks:
{"engine": ask} or {"facts": true}, and on that socket {"measure": micro batch} → {"simulated": …} | {"failed": …}.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from dataclasses import dataclass
from typing import Any

from ...system import processes
from ...types import WorkloadSource
from ..values import EngineSpec
from .protocol import answer, say, told


def main(argv: list[str]) -> None:
    """Serve until the client is gone."""
    client, device = socket.socket(fileno=int(argv[0])), argv[1]
    source, scratch = WorkloadSource(**json.loads(argv[2])), argv[3]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the client's to handle; it closes the socket
    try:
        with processes.die_with_peer(client):
            stage, workload = _prepare(device, source)
    except BaseException as error:
        say(client, {"failed": told(error, source.path)})
        return
    say(client, {"ready": os.getpid()})
    _serve(client, _Stand(stage, workload, source, scratch))
    shutil.rmtree(scratch, ignore_errors=True)  # a client that was killed could not


@dataclass(slots=True)
class _Stand:
    """What this process has prepared, and its children inherit."""

    stage: Any
    workload: Any
    source: WorkloadSource
    scratch: str
    rank: Any = None


def _serve(client: socket.socket, stand: _Stand) -> None:
    """Fork a process for each line, until the client is gone.

    Engines that start alike come from a child that has built their model, which this one starts and passes the line on.
    """
    parent = os.getpid()
    children: set[int] = set()
    passed: dict[str, socket.socket] = {}
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
        job = json.loads(line)
        alike = _alike(job, stand)
        if alike is not None and alike in passed:
            if _pass_on(passed[alike], line, own):
                own.close()
                continue
            passed.pop(alike).close()  # it died; another one is tried
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            processes.die_with_parent(parent)
            for other in (client, ours, *passed.values()):
                other.close()
            if alike is None:
                theirs.close()
                _live(own, job, stand)
            own.close()
            _build(theirs, job, stand)
        children.add(pid)
        theirs.close()
        if alike is None:
            ours.close()
        else:
            passed[alike] = ours
            _pass_on(ours, line, own)
        own.close()
    for pid in children:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _alike(job: dict[str, Any], stand: _Stand) -> str | None:
    """Equal for engines that can share a model; None: fork the engine here.

    Under zero.Init DeepSpeed has a part in building, by the rung's config; a script builds for itself.
    """
    ask = job.get("engine")
    if stand.rank is not None or ask is None or ask["zero_init"] or stand.source.kind == "script":
        return None
    return json.dumps([ask[name] for name in ("world_size", "ranks_per_node", "device_bytes", "checkpointing")])


def _pass_on(child: socket.socket, line: bytes, own: socket.socket) -> bool:
    try:
        socket.send_fds(child, [line], [own.fileno()])
    except OSError:
        return False
    return True


def _build(client: socket.socket, job: dict[str, Any], stand: _Stand) -> None:
    """The life of a process that builds what engines share, and forks them. Never returns."""
    faulthandler.enable()
    from ...trial import preload
    from .engine import Rank

    try:
        stand.rank = Rank(stand.stage, stand.workload, EngineSpec(**job["engine"]))
        preload.settle()
        _serve(client, stand)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)


def _prepare(device: str, source: WorkloadSource) -> tuple[Any, Any]:
    gc.disable()  # nearly all that imports make stays
    os.environ.update(DS_ACCELERATOR=device, DS_IGNORE_CUDA_DETECTION="1", CUDA_VISIBLE_DEVICES="")
    if device == "cuda":
        from .gpu_library import load as load_library

        library = load_library()
        import torch  # noqa: F401  # a CUDA build puts in its own guard

        library.autods_register_guard()
    from ...trial import preload
    from .fake_gpu import no_gpu_visible

    with no_gpu_visible() if device == "cuda" else contextlib.nullcontext():
        preload.preload()
    from ...workload.load import load
    from .engine import Stage

    stage = Stage(cpu=device == "cpu")
    workload = None
    if source.kind == "script":
        preload.preload_script(source)
    else:
        workload = load(source)
    gc.enable()
    preload.settle()
    return stage, workload


def _live(own: socket.socket, job: dict[str, Any], stand: _Stand) -> None:
    """The life of one engine's process. Never returns."""
    faulthandler.enable()
    from .engine import Engine, look

    with tempfile.TemporaryDirectory(dir=stand.scratch) as scratch:
        try:
            os.chdir(scratch)
            if stand.source.kind == "script":
                from . import script_engine

                script_engine.live(own, job, stand.stage, stand.source, scratch)
            elif "facts" in job:
                answer(own, stand.source, lambda: {"facts": look(stand.stage, stand.workload)})
            else:
                engine = Engine(stand.stage, stand.workload, EngineSpec(**job["engine"]), scratch, stand.rank)
                for line in own.makefile():
                    micro_batch = int(json.loads(line)["measure"])
                    if not answer(own, stand.source, lambda: {"simulated": engine.measure(micro_batch)}):  # noqa: B023
                        break
        except BaseException:
            traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)


def _reap(children: set[int]) -> None:
    for pid in list(children):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                continue
        children.discard(pid)


if __name__ == "__main__":
    main(sys.argv[1:])
