"""One rank of a job, from its environment to its result.

The zygote forks ranks and calls `run_rank`. Where it must not fork, it starts
`python -m autods.trial.worker SLOT HEARTBEAT_FD STORE_FD JOB_FILE` instead.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..config.deepspeed import get_key
from ..system.host import find_interface, threads_per_rank
from ..workload.hf_config import partition_at_build
from ..workload.load import bind_options, load
from ..workload.protocol import Workload
from .job import JobKind, RankJob, describe_error, write_json
from .memory_cpu import CpuMeter, Meter
from .memory_cuda import CudaMeter
from .model_facts import seed_all
from .preload import preload
from .progress import Heartbeats, Observer

Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """A rank's job and its resources.

    `slot` is its place on this node. `store` is the socket on which rank 0 serves the rendezvous. `workload` is the
    zygote's copy, if it could load one. `leave` ends this process with a result or an error, for user code that does
    not return.
    """

    job: RankJob
    slot: int
    observer: Observer
    store: socket.socket | None
    workload: Workload | None
    leave: Callable[[Result | BaseException], NoReturn]

    @property
    def seed(self) -> int:
        """Each rank draws different data. When losses are compared, the ranks share it: samples have separate seeds."""
        return self.job.seed if self.job.exam == "parity" else self.job.seed + self.job.local_ranks[self.slot]

    def load_workload(self) -> Workload:
        """Return the workload with this job's arguments. What the user's code raises is passed on."""
        if self.workload is None:
            return load(self.job.source)
        return bind_options(self.workload, self.job.source) if self.job.rebind else self.workload


def run_rank(job: RankJob, slot: int, board: Heartbeats, store: socket.socket | None, workload: Workload | None) -> int:
    """Do the job, write `rank<N>.json`, and return the exit code. See `RankContext` for the arguments."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the monitor asks a stuck rank for its stack
    board.beat(slot, "start", 0)
    _set_threads(job)
    meter: Meter = CpuMeter(job.limit_bytes) if job.device == "cpu" else CudaMeter(job.limit_bytes, slot)
    observer = Observer(board, slot, meter)

    def leave(end: Result | BaseException) -> NoReturn:
        os._exit(_write_record(job, observer, end))

    handlers = _SCRIPT_HANDLERS if job.source.kind == "script" else _HANDLERS
    try:
        context = RankContext(job=job, slot=slot, observer=observer, store=store, workload=workload, leave=leave)
        return _write_record(job, observer, handlers[job.job](context))
    except BaseException as error:  # SystemExit of user code too: a rank that leaves without a result is a failure
        return _write_record(job, observer, error)


def environment(job: RankJob, slot: int, port: int) -> dict[str, str]:
    """Return this process's environment with the variables of torchrun and the rank's number of threads."""
    variables = {
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
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    elif (interface := find_interface(job.node_address)) is not None:
        # By default they resolve the host's name, which is a loopback address on many machines.
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        variables |= {name: interface for name in names if name not in os.environ}
    # The host works in CUDA jobs as well: an offloaded optimizer takes all cores that it gets.
    variables["OMP_NUM_THREADS"] = variables["MKL_NUM_THREADS"] = str(_threads(job))
    return {**os.environ, **variables}


def _survey(context: RankContext) -> Result:
    """Describe the workload, and the DeepSpeed ops that cannot be built here."""
    from .model_facts import survey

    context.observer("build", 0)
    facts = survey(context.load_workload())
    return {"facts": facts, "op_problems": _find_op_problems(context.job)}


def _build_ops(context: RankContext) -> Result:
    from .ops import build

    context.observer("build", 0)
    for op in context.job.ops:
        build(op)
    return {}


def _train(context: RankContext) -> Result:
    from .distributed import Ranks, join
    from .training import train

    job, observer = context.job, context.observer
    seed_all(context.seed)
    observer.meter.start()
    observer("rendezvous", 0)
    join(job, context.slot, context.store)
    workload = context.load_workload()
    if job.source.zero_init and job.exam != "parity" and get_key(job.ds_config, "zero_optimization.stage") == 3:
        workload = partition_at_build(workload, job.ds_config)
    ranks = Ranks(job.local_ranks[context.slot], job.world_size)
    result = train(workload, job, observe=observer, synchronize=observer.meter.synchronize, ranks=ranks)
    return {**asdict(result), **_measurements(observer)}


def _survey_script(context: RankContext) -> Result:
    from .ops import clear_killed_builds

    problems = _find_op_problems(context.job)
    clear_killed_builds()
    return _run_script(context, lambda facts: {"facts": facts, "op_problems": problems})


def _train_script(context: RankContext) -> Result:
    seed_all(context.seed)
    context.observer.meter.start()
    return _run_script(context, lambda steps: {**_measurements(context.observer), **steps})


def _run_script(context: RankContext, complete: Callable[[Result], Result]) -> Result:
    """Run the script as `__main__`. `complete` makes the rank's result from the result of the run."""
    from .script.run import run

    def leave(end: Result | BaseException) -> NoReturn:
        context.leave(end if isinstance(end, BaseException) else complete(end))

    return complete(run(context.job, context.slot, context.observer, context.store, leave))


_HANDLERS: Mapping[JobKind, Callable[[RankContext], Result]] = {"train": _train, "survey": _survey, "ops": _build_ops}
_SCRIPT_HANDLERS = {**_HANDLERS, "train": _train_script, "survey": _survey_script}


def _find_op_problems(job: RankJob) -> dict[str, str]:
    """Return why ops of the job cannot be built on this machine, by op; ops that can be built are absent.

    The result has a key 'fp16' when DeepSpeed's accelerator cannot train in it.
    """
    from deepspeed.accelerator import get_accelerator

    from .ops import find_problem

    problems = {op: problem for op in job.ops if (problem := find_problem(op))}
    return problems if get_accelerator().is_fp16_supported() else {**problems, "fp16": "this device has no fp16"}


def _measurements(observer: Observer) -> dict[str, Any]:
    """Return the seconds of building and initialising, and the peak bytes."""
    return {
        "build_s": observer.build_s,
        "init_s": observer.init_s,
        "peaks": observer.meter.peaks() | observer.training_peaks,
    }


def _write_record(job: RankJob, observer: Observer, end: Result | BaseException) -> int:
    """Write the rank's result or error into its file; return the exit code."""
    meter, rank = observer.meter, job.local_ranks[observer.slot]
    record: dict[str, Any]
    if isinstance(end, BaseException):
        record = {"ok": False, "error": describe_error(end, job.source.path), **_remaining_memory(meter)}
    else:
        record = {"ok": True, "result": end}
    meter.lift()
    if not record["ok"]:
        print(record["error"]["traceback"], file=sys.stderr)  # users are sent to this log
    record |= {"phase": observer.phase, "step": observer.step, "at_s": time.monotonic()}
    write_json(Path(job.folder) / f"rank{rank}.json", record)
    sys.stdout.flush()
    sys.stderr.flush()
    return 0 if record["ok"] else 1


def _remaining_memory(meter: Meter) -> dict[str, int | None]:
    try:
        return {"free_bytes": meter.free_bytes(), **meter.allocator()}
    except Exception:  # a broken device may not answer; the numbers are only evidence
        return {}


def _set_threads(job: RankJob) -> None:
    """Give torch the rank's threads. It inherited one thread from the zygote, which has to stay single-threaded."""
    import torch

    torch.set_num_threads(_threads(job))


def _threads(job: RankJob) -> int:
    return job.threads or threads_per_rank(len(job.local_ranks))


def main(argv: list[str]) -> NoReturn:
    """Run a rank in this new process, which imports everything itself; that takes about 10 seconds."""
    slot, heartbeat, store = (int(word) for word in argv[:3])
    job = RankJob.from_json(Path(argv[3]).read_text())
    preload()
    listening = socket.socket(fileno=store) if store >= 0 else None
    os._exit(run_rank(job, slot, Heartbeats.from_fd(heartbeat), listening, None))


if __name__ == "__main__":
    main(sys.argv[1:])
