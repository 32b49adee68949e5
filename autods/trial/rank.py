"""The life of one rank, from the fork to its result file. The only place that catches what a trial throws."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ..ds_config import get
from ..hardware import interface_of
from ..outcomes import Phase
from ..threads import share
from ..workload import Workload, WorkloadError, bound, load, partitioned
from .cuda_meter import CudaMeter
from .heartbeat import Heartbeats
from .meter import CpuMeter, Meter
from .seeds import seed_all
from .spec import RankJob, write_json

_TRACEBACK_CHARS = 6000


@dataclass(slots=True)
class Observer:
    """Told each phase by the act: beats the heart and lets the meter look."""

    board: Heartbeats
    slot: int
    meter: Meter
    phase: Phase = "start"
    step: int = 0
    build_began_s: float = 0.0
    build_s: float = 0.0
    init_began_s: float = 0.0
    init_s: float = 0.0
    in_steps: dict[str, int] = field(default_factory=dict)  # what holds of training alone, whatever comes after

    def touch(self, phase: Phase, step: int) -> None:
        """Alive in this phase, which is none of the trial's own: a script evaluates between its steps."""
        self.phase, self.step = phase, step
        self.meter.sample()
        self.board.beat(self.slot, phase, step)

    def __call__(self, phase: Phase, step: int) -> None:
        now = time.perf_counter()
        if phase == "build":
            self.build_began_s = now
        elif phase == "init":
            self.build_s, self.init_began_s = now - self.build_began_s, now
        elif self.phase == "init":
            self.init_s = now - self.init_began_s
            self.meter.begin_steps()
        elif phase == "evaluate" and not self.in_steps:
            self.in_steps = self.meter.allocator()
        elif phase == "save":
            self.in_steps |= self.meter.leave_device()
        self.touch(phase, step)


def run_rank(job: RankJob, slot: int, board: Heartbeats, store: socket.socket | None, workload: Workload | None) -> int:
    """Do the job, write `rank<N>.json`, return the exit code. workload: as the zygote loaded it, if it could."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the watcher asks a stuck rank where it is
    board.beat(slot, "start", 0)
    _take_threads(job)
    meter = _meter(job, slot)
    observer = Observer(board, slot, meter)
    jobs = _OF_A_SCRIPT if job.source.kind == "script" else _JOBS
    try:
        return _written(job, observer, jobs[job.job](job, slot, observer, store, workload))
    except BaseException as error:  # SystemExit of user code too: a rank that leaves without a result is a failure
        return _written(job, observer, error)


def _take_threads(job: RankJob) -> None:
    """The zygote, from which torch's number comes, had one, so that it could fork; from here on there is no fork."""
    import torch

    torch.set_num_threads(_threads(job))


def _threads(job: RankJob) -> int:
    return job.threads or share(len(job.local_ranks))


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


def describe(error: BaseException, user_file: str) -> dict[str, Any]:
    """An exception as plain values: its types, message, traceback, and the last frame of the user's own file."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if frame.filename == user_file]
    contract = _broken(error) if isinstance(error, WorkloadError) else None
    return {
        "types": [cls.__name__ for cls in type(error).__mro__ if cls not in (object, BaseException)],
        "message": str(error)[:_TRACEBACK_CHARS],
        "traceback": "".join(traceback.format_exception(error))[-_TRACEBACK_CHARS:],
        "causes": [[type(cause).__name__, str(cause)[:_TRACEBACK_CHARS]] for cause in _causes(error)],
        "user_frame": f"{users[-1].filename}:{users[-1].lineno}" if users else None,
        "contract": contract,
        "mend": error.mend if isinstance(error, WorkloadError) else None,
    }


def _broken(error: WorkloadError) -> str:
    """What of the contract is broken, with its line where that is known."""
    place, _, line = (error.where or "").rpartition(":")
    return f"{place}:{line}: {error.what}" if line.isdigit() else error.what


def _causes(error: BaseException) -> list[BaseException]:
    """What it was raised from, explicitly or while that was handled; the nearest first."""
    found: list[BaseException] = []
    following = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while following is not None and following not in found and len(found) < 8:
        found.append(following)
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
    return found


def _meter(job: RankJob, slot: int) -> Meter:
    return CpuMeter(job.limit_bytes) if job.device == "cpu" else CudaMeter(job.limit_bytes, slot)


def _left(meter: Meter) -> dict[str, int | None]:
    try:
        return {"free_bytes": meter.free_bytes(), **meter.allocator()}
    except Exception:  # the device may be beyond answering; the numbers are only evidence
        return {}


def _survey(job: RankJob, slot: int, observer: Observer, store: Any, workload: Workload | None) -> Any:
    from .survey import survey

    observer("build", 0)
    facts = survey(_loaded(job, workload))
    return {"facts": facts, "op_problems": _op_problems(job)}


def _op_problems(job: RankJob) -> dict[str, str]:
    from .ops import problem

    return {op: text for op in job.ops if (text := problem(op))}


def _ops(job: RankJob, slot: int, observer: Observer, store: Any, workload: Workload | None) -> Any:
    from .ops import build

    observer("build", 0)
    for op in job.ops:
        build(op)
    return {}


def _train(job: RankJob, slot: int, observer: Observer, store: socket.socket | None, workload: Workload | None) -> Any:
    from .act import act
    from .rendezvous import join, ranks_of

    rank = job.local_ranks[slot]
    # Ranks draw different data; where losses are compared, samples have seeds of their own and weights a common one.
    seed_all(job.seed if job.exam == "parity" else job.seed + rank)
    observer.meter.start()
    observer("rendezvous", 0)
    join(job, slot, store)
    built = _loaded(job, workload)
    if job.source.zero_init and job.exam != "parity" and get(job.ds_config, "zero_optimization.stage") == 3:
        built = partitioned(built, job.ds_config)
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
        ranks=ranks_of(job, slot),
        exam=job.exam,
        examined_from_s=job.examined_from_s,
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


def _survey_script(
    job: RankJob, slot: int, observer: Observer, store: socket.socket | None, workload: Workload | None
) -> Any:
    from .ops import clear_killed_builds

    problems = _op_problems(job)
    clear_killed_builds()
    return _run_script(job, slot, observer, store, lambda facts: {"facts": facts, "op_problems": problems})


def _train_script(
    job: RankJob, slot: int, observer: Observer, store: socket.socket | None, workload: Workload | None
) -> Any:
    seed_all(job.seed if job.exam == "parity" else job.seed + job.local_ranks[slot])
    observer.meter.start()
    return _run_script(job, slot, observer, store, lambda seen: _beside(observer) | seen)


def _run_script(
    job: RankJob,
    slot: int,
    observer: Observer,
    store: socket.socket | None,
    told: Callable[[dict[str, Any]], dict[str, Any]],
) -> dict[str, Any]:
    """Run the script as `__main__`. told: from what was seen of it to the result."""
    from .script.run import run

    def leave(end: dict[str, Any] | BaseException) -> NoReturn:
        os._exit(_written(job, observer, end if isinstance(end, BaseException) else told(end)))

    return told(run(job, slot, observer, store, leave))


def _beside(observer: Observer) -> dict[str, Any]:
    """What stands beside the steps in the result of a training rank."""
    return {
        "build_s": observer.build_s,
        "init_s": observer.init_s,
        "peaks": observer.meter.peaks() | observer.in_steps,
    }


def _loaded(job: RankJob, workload: Workload | None) -> Workload:
    if workload is None:
        return load(job.source)
    return bound(workload, job.source) if job.rebind else workload


_JOBS: dict[str, Callable[[RankJob, int, Observer, socket.socket | None, Workload | None], Any]] = {
    "train": _train,
    "survey": _survey,
    "ops": _ops,
}
_OF_A_SCRIPT = {**_JOBS, "train": _train_script, "survey": _survey_script}


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
