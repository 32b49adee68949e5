"""One rank: set up its environment, do its job, write its record.

`python -m autods.trial.worker SLOT HEARTBEAT_FD STORE_FD JOB_FILE` is a rank that cannot be forked from the zygote.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..config.deepspeed import get_key
from ..system.host import find_interface, threads_per_rank
from ..workload.hf_config import partition_at_build
from ..workload.load import bind_options, load
from ..workload.protocol import Workload
from .batch import seed_all
from .job import Job, RankJob, describe, write_json
from .memory_cpu import CpuMeter, Meter
from .memory_cuda import CudaMeter
from .preload import preload
from .progress import Heartbeats, Observer

Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Duty:
    """The job of one rank, and what it is done with. slot: its place on this node.

    store: the socket that rank 0 serves. workload: as the zygote loaded it, if it could. leave: ends this process with
    a result, or an error, where the user's code does not let itself be ended.
    """

    job: RankJob
    slot: int
    observer: Observer
    store: socket.socket | None
    workload: Workload | None
    leave: Callable[[Result | BaseException], NoReturn]

    @property
    def seed(self) -> int:
        """Ranks draw different data; where losses are compared, samples have seeds of their own and weights a common
        one."""
        job = self.job
        return job.seed if job.exam == "parity" else job.seed + job.local_ranks[self.slot]


def done(duty: Duty) -> Result:
    """The result of the rank, as plain values."""
    ways = _OF_A_SCRIPT if duty.job.source.kind == "script" else _WAYS
    return ways[duty.job.job](duty)


def _survey(duty: Duty) -> Result:
    from .model_facts import survey

    duty.observer("build", 0)
    facts = survey(_loaded(duty))
    return {"facts": facts, "op_problems": _op_problems(duty.job)}


def _op_problems(job: RankJob) -> dict[str, str]:
    from .ops import problem

    return {op: text for op in job.ops if (text := problem(op))}


def _ops(duty: Duty) -> Result:
    from .ops import build

    duty.observer("build", 0)
    for op in duty.job.ops:
        build(op)
    return {}


def _train(duty: Duty) -> Result:
    from .distributed import join, ranks_of
    from .training import act

    job, observer = duty.job, duty.observer
    seed_all(duty.seed)
    observer.meter.start()
    observer("rendezvous", 0)
    join(job, duty.slot, duty.store)
    built = _loaded(duty)
    if job.source.zero_init and job.exam != "parity" and get_key(job.ds_config, "zero_optimization.stage") == 3:
        built = partition_at_build(built, job.ds_config)
    acted = act(
        built,
        ds_config=job.ds_config,
        micro_batch=job.micro_batch,
        accumulation=job.accumulation,
        checkpointing=job.checkpointing,
        only_build=job.only_build,
        steps=job.steps,
        observe=observer,
        synchronize=observer.meter.synchronize,
        ranks=ranks_of(job, duty.slot),
        exam=job.exam,
        scratch=Path(job.checkpoints or job.scratch),
        seed=job.seed,
    )
    return {
        "step_s": acted.step_s,
        "steps_s": acted.steps_s,
        "losses": acted.losses,
        "examined": acted.examined,
        "communication": acted.communication,
        **_beside(observer),
    }


def _loaded(duty: Duty) -> Workload:
    if duty.workload is None:
        return load(duty.job.source)
    return bind_options(duty.workload, duty.job.source) if duty.job.rebind else duty.workload


def _survey_script(duty: Duty) -> Result:
    from .ops import clear_killed_builds

    problems = _op_problems(duty.job)
    clear_killed_builds()
    return _run_script(duty, lambda facts: {"facts": facts, "op_problems": problems})


def _train_script(duty: Duty) -> Result:
    seed_all(duty.seed)
    duty.observer.meter.start()
    return _run_script(duty, lambda seen: {**_beside(duty.observer), **seen})


def _run_script(duty: Duty, told: Callable[[Result], Result]) -> Result:
    """Run the script as `__main__`. told: from what was seen of it to the result."""
    from .script.run import run

    def leave(end: Result | BaseException) -> NoReturn:
        duty.leave(end if isinstance(end, BaseException) else told(end))

    return told(run(duty.job, duty.slot, duty.observer, duty.store, leave))


def _beside(observer: Observer) -> dict[str, Any]:
    """What stands beside the steps in the result of a training rank."""
    return {
        "build_s": observer.build_s,
        "init_s": observer.init_s,
        "peaks": observer.meter.peaks() | observer.in_steps,
    }


_WAYS: Mapping[Job, Callable[[Duty], Result]] = {"train": _train, "survey": _survey, "ops": _ops}
_OF_A_SCRIPT: Mapping[Job, Callable[[Duty], Result]] = {**_WAYS, "train": _train_script, "survey": _survey_script}


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
    elif (interface := find_interface(job.node_address)) is not None:
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
