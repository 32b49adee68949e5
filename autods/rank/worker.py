"""One rank of a job, from its environment to its result.

The zygote forks ranks and calls `run_rank`. Where it must not fork, it starts
`python -m autods.rank.worker SLOT HEARTBEAT_FD STORE_FD JOB_FILE` instead.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import io
import json
import os
import signal
import socket
import statistics
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..config.deepspeed import get_key
from ..devices import find_device
from ..diagnosis.evidence import RESULT_PREVENTED_EXIT, RESULT_UNWRITTEN_EXIT
from ..errors import NO_ROOM
from ..files import is_library_file
from ..plain_text import read_traceback
from ..system import processes, stacks
from ..system.host import requested_threads
from ..types import ModelFacts, Phase
from ..workload.load import bind_options, check_process, in_one_process, load
from ..workload.protocol import Workload
from .job import RUN_VARIABLE, Heartbeats, JobKind, RankJob
from .memory import Baseline, Meter, make_meter
from .model_facts import seed_all
from .patching import declare
from .preload import preload
from .record import JobResult, OpsResult, PreflightResult, RankResult, ScriptEnd, SurveyResult, describe_error
from .script.inject import run_script
from .script.trial_policy import TrialPolicy
from .training_run import session
from .training_run.run_policy import RunPolicy
from .zero_init import partition_at_build

if TYPE_CHECKING:
    from .distributed import Ranks

_NEW_GROUP = declare(
    "torch.distributed.distributed_c10d._new_process_group_helper",
    "a CPU rank's memory limit does not keep gloo's threads from starting: gloo waits for ever for one that cannot",
)
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.ENODEV, errno.ETIMEDOUT)
_SAMPLE_EVERY_S = 0.05  # in a run: amid training, the kernel takes 50 µs to count a process's memory
_ONCE: tuple[Phase, ...] = ("rendezvous", "build", "init")
_FORWARDS, _FEWEST_FORWARDS = 64, 3  # whose median tells of a rank's speed


@dataclass(slots=True)
class ForwardClock:
    """Times the forwards of one rank, as its device does them. It never waits for the device.

    All ranks' steps take equally long, since they wait for one another in collectives. A forward waits for none up to
    ZeRO-2: gradients are reduced by hooks of the backward, and weights gathered in the step (DeepSpeed's
    stage_1_and_2.py, `reduce_ready_partitions_and_remove_grads` and `all_gather_dp_groups`). ZeRO-3 gathers weights in
    it, and experts, pipelines and parallel sequences exchange activations: there all ranks have about the same time.
    """

    meter: Meter
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_FORWARDS))
    _begin: Any = None
    _pending: tuple[Any, Any] | None = None

    def enter(self, phase: Phase) -> bool:
        """A phase begins; return whether there is a new time of a forward."""
        is_new = False
        if self._pending is not None and (seconds := self.meter.seconds_between(*self._pending)) is not None:
            self.seconds.append(seconds)
            self._pending, is_new = None, True
        if phase == "backward" and self._begin is not None and self._pending is None:
            self._pending = self._begin, self.meter.mark()
        self._begin = self.meter.mark() if phase == "forward" else None
        return is_new

    @property
    def usual_s(self) -> float:
        """The median; 0 after few."""
        return statistics.median(self.seconds) if len(self.seconds) >= _FEWEST_FORWARDS else 0.0


@dataclass(slots=True)
class Observer:
    """Called at each phase of a trial: writes a heartbeat, samples the meter, and times building and initialising.

    `training_peaks` has the measurements that count for training alone, whatever an exam does after it. The meter is
    sampled at each phase, or where `sample_every_s` have passed since.
    """

    board: Heartbeats
    slot: int
    meter: Meter
    phase: Phase = "start"
    step: int = 0
    build_s: float = 0.0
    init_s: float = 0.0
    training_peaks: dict[str, int] = field(default_factory=dict)
    sample_every_s: float = 0.0
    pid: int = field(default_factory=os.getpid)
    clock: ForwardClock = field(init=False)
    _sampled_s: float = 0.0
    _build_began_s: float = 0.0
    _init_began_s: float = 0.0
    _first_step: int | None = None  # of training here: a run may go on from a checkpoint
    _first_step_over: bool = False

    def __post_init__(self) -> None:
        self.clock = ForwardClock(self.meter)

    def __call__(self, phase: Phase, step: int) -> None:
        check_process(self.pid)
        now = time.perf_counter()
        if phase == "build":
            self._build_began_s = now
        elif phase == "init":
            self.build_s, self._init_began_s = now - self._build_began_s, now
        elif self.phase == "init":
            self.init_s = now - self._init_began_s
        elif phase == "evaluate" and not self.training_peaks:
            self.training_peaks = self.meter.allocator()
        elif phase == "save":
            self.training_peaks |= self.meter.leave_device()
        if phase == "forward" and self._first_step is None:
            self._first_step = step
        ends_first_step = not self._first_step_over and self._first_step is not None and step > self._first_step
        if (phase != self.phase and self.phase in _ONCE) or ends_first_step:
            self._first_step_over = self._first_step_over or ends_first_step
            self.meter.settle()
        self.touch(phase, step)

    def watch_compiles(self) -> None:
        """Be in the phase "compile" while torch.compile works, which may take minutes; then in the one before."""
        from torch._dynamo.callback import on_compile_end, on_compile_start

        on_compile_start(lambda *args: self.board.beat(self.slot, "compile", self.step))
        on_compile_end(lambda *args: self.board.beat(self.slot, self.phase, self.step))

    def touch(self, phase: Phase, step: int) -> None:
        """Write a heartbeat for work between the trial's own phases, such as an evaluation that a script does."""
        self.phase, self.step = phase, step
        if self.clock.enter(phase):
            self.board.note_forward(self.slot, self.clock.usual_s)
        now = time.monotonic()
        if now - self._sampled_s >= self.sample_every_s:
            self._sampled_s = now
            self.meter.sample()
        self.board.beat(self.slot, phase, step)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """A rank's job and its resources.

    `slot` is its place on this node. `store` is the socket on which rank 0 serves the rendezvous of several nodes.
    `workload` is the zygote's copy, if it could load one. `baseline` is the memory before the model, if this process
    was forked from one that had built it.
    """

    job: RankJob
    slot: int
    observer: Observer
    store: socket.socket | None
    workload: Workload | None
    baseline: Baseline | None = None

    def load_workload(self) -> Workload:
        """Return the workload with this job's arguments. What the user's code raises is passed on."""
        if self.workload is None:
            return load(self.job.source)
        return bind_options(self.workload, self.job.source) if self.job.rebind else self.workload

    def load_for_training(self) -> Workload:
        """Return the workload as it trains: with its weights; with `--zero-init`, stage 3 builds the model in parts."""
        workload, job = self.load_workload().with_weights(), self.job
        if job.source.zero_init and get_key(job.ds_config, "zero_optimization.stage") == 3:
            return partition_at_build(workload, job.ds_config)
        return workload

    def run_script(self, complete: Callable[[ScriptEnd], JobResult]) -> JobResult:
        """Run the script as `__main__`. `complete` makes the rank's result from the result of the run."""

        def leave(end: ScriptEnd | BaseException) -> NoReturn:
            os._exit(self.write_record(end if isinstance(end, BaseException) else complete(end)))

        policy = TrialPolicy(self.job, self.slot, self.observer, leave)
        run_script(self.job, self.slot, self.store, policy)
        return complete(policy.result())

    def write_record(self, end: JobResult | BaseException) -> int:
        """Write the rank's result or error into its file, whole or not at all; return the exit code.

        The record has fields of `runner.node_messages.RankExit`.
        """
        observer = self.observer
        record: dict[str, Any] = {}
        if isinstance(end, BaseException):
            with contextlib.suppress(Exception):  # a broken device may not answer; the numbers are only evidence
                record |= {"free_bytes": observer.meter.free_bytes(), **observer.meter.allocator()}
        observer.meter.lift()  # at its limit a rank has no memory to describe its error in
        if isinstance(end, BaseException):
            record["error"] = error = describe_error(end, self.job.source.path)
            _print_to_log(error.traceback)  # users are sent to this log
        else:
            record["result"] = end
        record |= {"phase": observer.phase, "step": observer.step, "at_s": time.monotonic()}
        path = Path(self.job.folder) / f"rank{self.job.local_ranks[self.slot]}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(record, default=asdict))
        os.replace(temporary, path)
        _print_to_log("")
        return int("error" in record)


def _print_to_log(text: str) -> None:
    """Write after what the workload has printed; it may have replaced or closed the streams."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode() if text else b"")


class LossyLog(io.FileIO):
    """A rank's log, which loses lines while its disk is full. Python's file would raise in the user's `print`."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return memoryview(data).nbytes


def keep_printing_without_room() -> None:
    """Let what Python code prints from now on be lost where the disk of the log is full, so that training goes on."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        log = io.BufferedWriter(LossyLog(number, "wb", closefd=False))
        setattr(sys, name, io.TextIOWrapper(log, encoding="utf-8", errors="backslashreplace", line_buffering=True))


def show_library_warnings_once() -> None:
    """Print a library's warning of one place once, in one line. Python forgets that it did when torch changes filters.

    Those of the user's own code are printed as ever. `supervisor.progress` knows the line, and leaves it in the log.
    """
    show, seen = warnings.showwarning, set[tuple[object, ...]]()

    def show_once(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: Any, **options: Any
    ) -> None:
        if not is_library_file(filename):
            show(message, category, filename, lineno, *more, **options)
        elif (place := (category, filename, lineno)) not in seen:
            seen.add(place)
            print(f"{filename}:{lineno}: {category.__name__}: {' '.join(str(message).split())}", file=sys.stderr)

    warnings.showwarning = show_once


def run_rank(
    job: RankJob,
    slot: int,
    board: Heartbeats,
    store: socket.socket | None,
    workload: Workload | None,
    baseline: Baseline | None = None,
) -> int:
    """Do the job, write `rank<N>.json`, and return the exit code. See `RankContext` for the arguments.

    Without a file the exit code is `RESULT_UNWRITTEN_EXIT` or `RESULT_PREVENTED_EXIT`.
    """
    import torch

    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the monitor asks a stuck rank for its stacks
    stacks.answer_requests()  # and a silent one where it is
    processes.leave_sigterm_to_driver()
    processes.put_pid_into_names()
    show_library_warnings_once()
    board.beat(slot, "start", 0)
    torch.set_num_threads(requested_threads() or job.rank_threads)  # the zygote has a single one, which it must keep
    meter = make_meter(job.device, job.limit_bytes, slot)
    _NEW_GROUP.wrap(meter.run_without_limit)
    observer = Observer(board, slot, meter)
    observer.watch_compiles()
    context = RankContext(job=job, slot=slot, observer=observer, store=store, workload=workload, baseline=baseline)
    try:
        try:
            with in_one_process(context.write_record):
                result = _HANDLERS[job.job](context)
            return context.write_record(result)
        except BaseException as error:  # SystemExit of user code too: a rank that leaves without a result is a failure
            return context.write_record(error)
    except BaseException as error:
        meter.lift()
        _print_to_log(read_traceback(error))
        is_disk = isinstance(error, OSError) and error.errno in _DISK_ERRORS
        return RESULT_UNWRITTEN_EXIT if is_disk else RESULT_PREVENTED_EXIT


def _build_ops(context: RankContext) -> JobResult:
    from .ops import build

    context.observer("build", 0)
    for op in context.job.ops:
        build(op)
    return OpsResult()


def _meet(context: RankContext) -> Ranks:
    """Let the ranks meet, without a workload."""
    from .distributed import Ranks, join

    job, observer = context.job, context.observer
    observer.meter.start()
    observer("rendezvous", 0)
    join(job, context.store)
    observer("init", 0)
    return Ranks(job.local_ranks[context.slot], job.world_size)


def _preflight(context: RankContext) -> JobResult:
    """Let the ranks meet, and measure their links before minutes are spent on a model."""
    ranks, device = _meet(context), find_device(context.job.device)
    rate = ranks.measure_all_reduce(device.reduced_bytes, context.observer.meter.synchronize)
    return PreflightResult(bytes_per_s=rate)


def _measure(context: RankContext) -> JobResult:
    """Measure what this machine reaches, see `benchmark`."""
    from deepspeed.accelerator import get_accelerator

    from .benchmark import Benchmark

    job, observer, ranks = context.job, context.observer, _meet(context)
    return Benchmark(
        ranks=ranks,
        device=str(get_accelerator().current_device_name()),
        has_cards=find_device(job.device).has_cards,
        synchronize=observer.meter.synchronize,
        beat=lambda: observer.touch("init", 0),
        nvme=None if job.swap is None else Path(job.swap),
    ).run()


def _survey(context: RankContext) -> JobResult:
    """Describe the workload, and why DeepSpeed's ops cannot be built here, by op; 'fp16' if the device lacks it."""
    from deepspeed.accelerator import get_accelerator

    from .model_facts import survey
    from .ops import find_problem

    problems = {op: problem for op in context.job.ops if (problem := find_problem(op))}
    if not get_accelerator().is_fp16_supported():
        problems["fp16"] = "this device has no fp16"

    def complete(facts: ScriptEnd) -> SurveyResult:
        assert isinstance(facts, ModelFacts)
        return SurveyResult(facts=facts, op_problems=problems)

    if context.job.source.form.runs_as_main:
        return context.run_script(complete)
    context.observer("build", 0)
    return complete(survey(context.load_workload()))


def _train(context: RankContext) -> JobResult:
    """Run the trial's steps; return their measurements with the seconds before them and the peak bytes."""
    from .distributed import Ranks, join
    from .model_trial import TRIALS

    job, observer, meter = context.job, context.observer, context.observer.meter
    rank = job.local_ranks[context.slot]
    seed_all(job.seed_of(rank))
    meter.start(context.baseline)

    def complete(result: ScriptEnd) -> RankResult:
        assert isinstance(result, RankResult)
        peaks = meter.peaks() | observer.training_peaks
        return replace(result, build_s=observer.build_s, init_s=observer.init_s, peaks=peaks)

    if job.source.form.runs_as_main:
        return context.run_script(complete)
    observer("rendezvous", 0)
    join(job, context.store)
    workload = context.load_for_training()
    ranks = Ranks(rank, job.world_size)
    trial = TRIALS[job.exam](workload, job, observe=observer, meter=meter, ranks=ranks)
    return complete(trial.run())


def _run(context: RankContext) -> JobResult:
    """Do this rank's part of a training run; return how it ended, with the peak bytes."""
    job = context.job
    assert job.order is not None
    keep_printing_without_room()
    os.environ[RUN_VARIABLE] = str(job.order.job_file)
    seed_all(job.seed + job.local_ranks[context.slot])
    context.observer.meter.start()
    context.observer.sample_every_s = _SAMPLE_EVERY_S
    session.observer = context.observer
    if job.source.form.runs_as_main:
        run_script(job, context.slot, context.store, RunPolicy(job, context.observer))
    else:
        from .distributed import join
        from .training_run.loop import train

        context.observer("rendezvous", 0)
        join(job, context.store)
        with contextlib.suppress(session.Stopped):
            train(context.load_for_training(), job, context.observer)
    context.observer("done", context.observer.step)
    return replace(session.describe_end(), peaks=context.observer.meter.peaks())


_HANDLERS: Mapping[JobKind, Callable[[RankContext], JobResult]] = {
    "train": _train,
    "survey": _survey,
    "ops": _build_ops,
    "run": _run,
    "preflight": _preflight,
    "measure": _measure,
}


def main(argv: list[str]) -> NoReturn:
    """Run a rank in this new process, which imports everything itself; that takes about 10 seconds."""
    slot, heartbeat, store = (int(word) for word in argv[:3])
    job = RankJob.from_json(Path(argv[3]).read_text())
    preload()
    listening = socket.socket(fileno=store) if store >= 0 else None
    os._exit(run_rank(job, slot, Heartbeats.from_fd(heartbeat), listening, None))


if __name__ == "__main__":
    main(sys.argv[1:])
