"""The life of one rank, from the fork to its result file. The only place that catches what a trial throws."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ..hardware import interface_of
from ..threads import share
from ..workload import Workload
from .cuda_meter import CudaMeter
from .describe import describe
from .duties import Duty, done
from .heartbeat import Heartbeats
from .meter import CpuMeter, Meter
from .observer import Observer
from .spec import RankJob, write_json


def run_rank(job: RankJob, slot: int, board: Heartbeats, store: socket.socket | None, workload: Workload | None) -> int:
    """Do the job, write `rank<N>.json`, return the exit code. workload: as the zygote loaded it, if it could."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the watcher asks a stuck rank where it is
    board.beat(slot, "start", 0)
    _take_threads(job)
    observer = Observer(board, slot, _meter(job, slot))

    def leave(end: Mapping[str, Any] | BaseException) -> NoReturn:
        os._exit(_written(job, observer, end))

    try:
        duty = Duty(job=job, slot=slot, observer=observer, store=store, workload=workload, leave=leave)
        return _written(job, observer, done(duty))
    except BaseException as error:  # SystemExit of user code too: a rank that leaves without a result is a failure
        return _written(job, observer, error)


def _written(job: RankJob, observer: Observer, end: Mapping[str, Any] | BaseException) -> int:
    """The result of the rank, or what it died of, into its file; the exit code."""
    meter, rank = observer.meter, job.local_ranks[observer.slot]
    record: dict[str, Any]
    if isinstance(end, BaseException):
        record = {"ok": False, "error": describe(end, job.source.path), **_left(meter)}
    else:
        record = {"ok": True, "result": end}
    if isinstance(meter, CpuMeter):
        meter.lift()
    if not record["ok"]:
        print(record["error"]["traceback"], file=sys.stderr)  # the log is where a person is sent
    record |= {"phase": observer.phase, "step": observer.step, "at_s": time.monotonic()}
    write_json(Path(job.folder) / f"rank{rank}.json", record)
    sys.stdout.flush()
    sys.stderr.flush()
    return 0 if record["ok"] else 1


def _meter(job: RankJob, slot: int) -> Meter:
    return CpuMeter(job.limit_bytes) if job.device == "cpu" else CudaMeter(job.limit_bytes, slot)


def _left(meter: Meter) -> dict[str, int | None]:
    try:
        return {"free_bytes": meter.free_bytes(), **meter.allocator()}
    except Exception:  # the device may be beyond answering; the numbers are only evidence
        return {}


def environment(job: RankJob, slot: int, port: int) -> dict[str, str]:
    """What torchrun would set, and as many threads as the rank may have."""
    said = {
        "RANK": str(job.local_ranks[slot]),
        "LOCAL_RANK": str(slot),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(len(job.local_ranks)),
        "NODE_RANK": str(job.node_rank),
        "GROUP_RANK": str(job.node_rank),
        "MASTER_ADDR": job.master_address,
        "MASTER_PORT": str(port),
    }
    if job.master_address == "127.0.0.1":
        said["GLOO_SOCKET_IFNAME"] = "lo"
    elif (interface := interface_of(job.node_address)) is not None:
        # Left alone they ask what the host's name resolves to, which is a loopback address on many machines.
        said |= {name: interface for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in os.environ}
    # Beside a card the host works, too: an offloaded optimizer takes all cores that it gets.
    said["OMP_NUM_THREADS"] = said["MKL_NUM_THREADS"] = str(_threads(job))
    return {**os.environ, **said}


def _take_threads(job: RankJob) -> None:
    """The zygote, from which torch's number comes, had one, so that it could fork; from here on there is no fork."""
    import torch

    torch.set_num_threads(_threads(job))


def _threads(job: RankJob) -> int:
    return job.threads or share(len(job.local_ranks))
