"""An unmodified training script on the simulated device, run to the end of its second optimizer step.

The hooks are those of a trial (`rank.script`), and the ledger is the observer. A script cannot be rewound, so each
micro batch is a run in a separate process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ...config.deepspeed import (
    BATCH_KEYS,
    DEFAULT_OPTIMIZER,
    ENOUGH_ACCUMULATION,
    count_sharers,
    merge,
    strip_rung_keys,
)
from ...rank.job import RankJob
from ...rank.memory import Meter
from ...rank.record import ScriptEnd
from ...rank.script.inject import run_script
from ...rank.script.trial_policy import TrialPolicy
from ...system import processes
from ...system.stacks import find_raiser
from ...types import ModelFacts, Phase, Steps, WorkloadSource
from ...units import format_signal
from ...workload.protocol import WorkloadError
from ..values import EngineSpec, Simulation
from . import attribution, script_patches
from .engine import SimulationContext, read_ledger, swap_into
from .protocol import (
    ModelRequest,
    Request,
    SimulationFailed,
    explain_optimizer_errors,
    failure_of,
    receive,
    send,
)

_STEPS = Steps(warmup=1, timed=1, most_timed=1)  # the second step differs, see `engine`
_ANSWERED = 93  # exit code of a run that has sent its answer; unlikely to be a script's own
_HINT = "where the script runs by itself, real trials measure it: autods fit"
DRAWN = "the batches of the script's first two optimizer steps were simulated: longer samples need more"


def answer_requests(
    connection: socket.socket, request: Request, context: SimulationContext, source: WorkloadSource, scratch: str
) -> None:
    """Answer each micro batch with a run of the script, or a `ModelRequest` with one run up to its engine."""
    runs: Iterable[tuple[EngineSpec, int]]
    if isinstance(request, EngineSpec):
        runs = ((request, micro_batch) for micro_batch in receive(connection))
    else:
        runs = [(_unsharded(context, source, request), request.micro_batch)]
    for spec, micro_batch in runs:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            processes.die_with_parent(parent)
            folder = tempfile.mkdtemp(dir=scratch)
            only_looks = isinstance(request, ModelRequest)
            _ScriptRun(connection, context, source, folder, spec, micro_batch, only_looks).run()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code != _ANSWERED:  # the next request is another run, and may succeed
            ending = f"killed by {format_signal(-code)}" if code < 0 else f"it left with exit code {code}"
            problem = f"the simulation of micro batch {micro_batch} ended without an answer: {ending}"
            send(connection, SimulationFailed(kind="crashed", problem=problem, place=source.path, hint=_HINT))


def _unsharded(context: SimulationContext, source: WorkloadSource, request: ModelRequest) -> EngineSpec:
    """An engine without any sharding, as the survey of a fit has it."""
    base = source.base_config if isinstance(source.base_config, Mapping) else {}
    config = merge({"zero_optimization": {"stage": 0}, "optimizer": DEFAULT_OPTIMIZER}, strip_rung_keys(base))
    return EngineSpec(
        rung="", ds_config=config, world_size=request.ranks, ranks_per_node=request.ranks, device_bytes=1 << 40,
        device=context.device.name, machine=request.machine,
    )  # fmt: skip


@dataclass
class _ScriptRun:
    """One run of the script, and the observer of its trial. `only_looks`: up to the script's engine only."""

    connection: socket.socket
    context: SimulationContext
    source: WorkloadSource
    scratch: str
    spec: EngineSpec
    micro_batch: int
    only_looks: bool
    result: Simulation | None = None

    def __post_init__(self) -> None:
        self._began = time.perf_counter()
        self._hangup = contextlib.ExitStack()
        self.meter = Meter()  # measures nothing: the ledger has the memory

    def run(self) -> NoReturn:
        """Run the script, send its result, and end this process."""
        sys.stdout.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the script's output is no log of a forecast
        try:
            self._hangup.enter_context(processes.die_with_peer(self.connection))
            self.context.become_rank(self.spec)
            script_patches.install(self.context.ledger)
            with self.context.active(), explain_optimizer_errors(self.spec.ds_config):
                job = self._job()
                policy = _SimulatedTrial(job, 0, self, self.leave)
                run_script(job, 0, None, policy)
            self.leave(policy.result())
        except BaseException as error:
            self.leave(error)

    def _job(self) -> RankJob:
        """The job as a trial's rank would get it."""
        config = swap_into(self.scratch, self.spec.ds_config)
        accumulation = min(ENOUGH_ACCUMULATION, int(config.get(BATCH_KEYS[2], 1)))
        config |= {BATCH_KEYS[1]: self.micro_batch, BATCH_KEYS[2]: accumulation}
        return RankJob(
            job="survey" if self.only_looks else "train",
            source=self.source,
            device=self.spec.device,
            folder=self.scratch,
            scratch=self.scratch,
            private=tempfile.mkdtemp(dir=Path(self.scratch).parents[1]),  # its path is short, for sockets
            world_size=self.spec.world_size,
            replica_ranks=count_sharers(config),
            ds_config=config,
            micro_batch=self.micro_batch,
            accumulation=accumulation,
            checkpointing=self.spec.checkpointing,
            steps=_STEPS,
        )

    def touch(self, phase: Phase, step: int) -> None:
        """Observer: the script is in this phase, which may be one that no forecast has."""
        if self.result is None:
            self.context.begin(phase, step)

    __call__ = touch

    def record(self, engine: Any) -> None:
        """Keep the result at the end of the second step; later allocations do not count."""
        self.context.ledger.assume(DRAWN)
        self.result = read_ledger(self.context.ledger, engine, self.micro_batch, time.perf_counter() - self._began)

    def leave(self, end: ScriptEnd | BaseException) -> NoReturn:
        """Send the result or the failure, and end this process."""
        self._hangup.close()  # the client's next request is no hanging up
        if isinstance(end, BaseException):
            traceback.print_exception(end)
            send(self.connection, _failure_of(end, self.source))
        elif isinstance(end, ModelFacts):
            send(self.connection, end)
        else:
            assert self.result is not None
            send(self.connection, self.result)
        sys.stderr.flush()
        os._exit(_ANSWERED)


class _SimulatedTrial(TrialPolicy):
    """A trial that neither times steps nor reads their results."""

    def take_model(self, model: Any) -> None:
        """Label the gradients of the model that the script gives to its engine."""
        if not self.job.stops_at_engine:
            attribution.label_gradients(self.observer.context.ledger, model)

    def note_loss(self, output: Any) -> None:
        """Ignore the loss, which has no value here."""

    def finish(self) -> NoReturn:
        """Record the result before the script ends and frees its tensors."""
        self.observer.record(self.engine)
        super().finish()

    def has_enough(self) -> bool:
        """Whether the second step has ended."""
        return self.step >= _STEPS.warmup + _STEPS.timed


def _failure_of(error: BaseException, source: WorkloadSource) -> SimulationFailed:
    """The failure that an exception of a script means, with the script's line."""
    if isinstance(error, WorkloadError):
        return SimulationFailed("user_code", error.problem, error.hint, error.place, own_batch=error.own_batch)
    failure = failure_of(error, source)
    if isinstance(error, SimulationFailed):
        return failure
    place = str(find_raiser(error) or failure.place or source.path)
    if "FakeTensorDeviceMismatchError" in failure.problem:  # a real GPU raises an error here too
        problem = "tensors of the CPU and of the GPU meet in one operation"
        return SimulationFailed(kind="user_code", problem=problem, place=place, hint="move the batch to engine.device")
    frames = traceback.extract_tb(error.__traceback__)
    kind = "engine" if frames and "/deepspeed/" in frames[-1].filename else failure.kind
    return SimulationFailed(
        kind=kind, problem=f"cannot run on the simulated device: {failure.problem}", place=place, hint=_HINT
    )
