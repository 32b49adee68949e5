"""A training script that nobody changed, on the simulated device: run up to the end of its second optimizer step.

The hooks are those of a trial (`trial.script`); the observer is the ledger. A script cannot be rewound, so each micro
batch is a run of its own, in a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Mapping
from typing import Any, NoReturn

from ...config.deepspeed import BATCH_KEYS, DEFAULT_OPTIMIZER, merge, strip_rung_keys
from ...system import processes
from ...trial.job import RankJob
from ...trial.script.run import run
from ...trial.script.session import Session
from ...trial.script.user_errors import find_raiser
from ...types import Phase, Steps, WorkloadSource
from ...workload.protocol import WorkloadError
from ..values import EngineSpec, ForecastPhase
from . import attribution, protocol, script_patches
from .engine import Stage, in_scratch, report_of, stand
from .protocol import say, told

_STEPS = Steps(warmup=1, timed=1, most_timed=1)  # the second differs, see `engine`
_LIMIT_S = 300.0  # of one run; simulated steps take seconds, what takes longer is the script's own work
_ENOUGH_ACCUMULATION = 2  # a third micro batch of a step allocates what the second does, and asks for more data
_ANSWERED = 93  # exit code of a run that said what came of it; a script that leaves by itself hardly takes this one
_HINT = "real trials measure it: autods fit"
_PHASES: Mapping[Phase, ForecastPhase] = {
    "build": "init", "init": "init", "forward": "forward", "backward": "backward", "step": "step",
    "evaluate": "forward",
}  # fmt: skip
DRAWN = "the batches of the script's first two optimizer steps were simulated: longer samples need more"


def live(own: socket.socket, job: Mapping[str, Any], stage: Stage, source: WorkloadSource, scratch: str) -> None:
    """Answer each line with a run of the script."""
    asked = EngineSpec(**job["engine"]) if "engine" in job else None
    questions = (int(json.loads(line)["measure"]) for line in own.makefile()) if asked else iter([1])
    for micro_batch in questions:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            processes.die_with_parent(parent)
            ask = asked or _looked_at(stage, source, job["ranks"])
            _Run(own, stage, source, tempfile.mkdtemp(dir=scratch), ask, micro_batch, only_looks=not asked).live()
        code = _code_of(pid)
        if code is None:
            what = f"its second optimizer step did not end within {_LIMIT_S:.0f} s on the simulated device"
            say(own, {"failed": {"kind": "stuck", "what": what, "where": source.path, "hint": _HINT}})
            return
        if code != _ANSWERED:  # one micro batch more or less: the next question is another run
            what = f"the simulation of micro batch {micro_batch} ended without an answer: {_ending(code)}"
            say(own, {"failed": {"kind": "crashed", "what": what, "where": source.path, "hint": _HINT}})


def _ending(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"it left with exit code {code}"


def _code_of(pid: int) -> int | None:
    """How the process ended; None: it took too long, and was ended."""
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    in_time = bool(poll.poll(_LIMIT_S * 1000))
    if not in_time:
        os.kill(pid, signal.SIGKILL)
    os.close(pidfd)
    status = os.waitpid(pid, 0)[1]
    processes.unlink_temporary([pid])
    return os.waitstatus_to_exitcode(status) if in_time else None


class _Run:
    """One run of the script, in a process of its own, to its end or to that of its second step.

    only_looks: up to its engine only, to look at the model.
    """

    def __init__(
        self, own: socket.socket, stage: Stage, source: WorkloadSource, scratch: str, ask: EngineSpec,
         micro_batch: int, *, only_looks: bool,
    ) -> None:  # fmt: skip
        self.own, self.stage, self.source, self.scratch = own, stage, source, scratch
        self.micro_batch, self.began = micro_batch, time.perf_counter()
        self.only_looks, self.ask = only_looks, ask
        self.listening = contextlib.ExitStack()
        self.report: dict[str, Any] | None = None
        # What a session asks of an observer; nobody measures here.
        self.meter = types.SimpleNamespace(peaks=dict, synchronize=lambda: None)
        self.in_steps: dict[str, int] = {}

    def live(self) -> NoReturn:
        """Run it and say what came of it."""
        sys.stdout.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what it prints is no log of a forecast
        try:
            self.listening.enter_context(processes.die_with_peer(self.own))
            stand(self.stage.ledger, self.ask)
            script_patches.install_plain_values(self.stage.ledger)
            with self.stage.on(), protocol.of_the_optimizer(self.ask.ds_config):
                seen = run(self.job(), 0, self, None, self.leave, lambda **known: _Rehearsal(self, **known))
            self.leave(seen)
        except BaseException as error:
            self.leave(error)

    def job(self) -> RankJob:
        """As the one of a trial."""
        ask = self.ask
        config = in_scratch(ask.ds_config, self.scratch)
        accumulation = min(_ENOUGH_ACCUMULATION, int(config.get(BATCH_KEYS[2], 1)))
        config |= {BATCH_KEYS[1]: self.micro_batch, BATCH_KEYS[2]: accumulation}
        return RankJob(
            job="survey" if self.only_looks else "train",
            source=self.source,
            device=ask.device,
            folder=self.scratch,
            scratch=self.scratch,
            world_size=ask.world_size,
            ds_config=config,
            micro_batch=self.micro_batch,
            accumulation=accumulation,
            steps=_STEPS,
        )

    def __call__(self, phase: Phase, step: int) -> None:
        """The observer's: a phase begins."""
        self.touch(phase, step)

    def touch(self, phase: Phase, step: int) -> None:
        """The observer's: alive in this phase, which may be none of the trial's own."""
        if phase in _PHASES and self.report is None:
            self.stage.ledger.begin(_PHASES[phase])

    def takes(self, model: Any) -> None:
        """The script hands its model over."""
        if not self.only_looks:
            attribution.watch_gradients(self.stage.ledger, model)

    def close_books(self, engine: Any) -> None:
        """The second step has ended."""
        ledger = self.stage.ledger
        ledger.assume(DRAWN)
        attribution.label(ledger, engine)
        seconds = time.perf_counter() - self.began
        self.report = report_of(ledger, self.micro_batch, attribution.optimizer_elements(engine), seconds)

    def leave(self, end: Mapping[str, Any] | BaseException) -> NoReturn:
        """Say it and end this process."""
        self.listening.close()  # the next question is no hanging up
        if isinstance(end, BaseException):
            traceback.print_exception(end)
            say(self.own, {"failed": _told(end, self.source)})
        elif self.only_looks:
            say(self.own, {"facts": dict(end)})
        else:
            say(self.own, {"simulated": self.report})
        sys.stderr.flush()
        os._exit(_ANSWERED)


def _looked_at(stage: Stage, source: WorkloadSource, ranks: int) -> EngineSpec:
    """For a look, as the survey's ranks: without any sharding."""
    base = source.base_config if isinstance(source.base_config, Mapping) else {}
    config = merge({"zero_optimization": {"stage": 0}, "optimizer": DEFAULT_OPTIMIZER}, strip_rung_keys(base))
    return EngineSpec(
        rung="", ds_config=config, world_size=ranks, ranks_per_node=ranks, device_bytes=1 << 40,
        device="cpu" if stage.ledger.one_memory else "cuda",
    )  # fmt: skip


class _Rehearsal(Session):
    """A session whose steps are neither timed nor read."""

    def __init__(self, run: _Run, **known: Any) -> None:
        super().__init__(**known)
        self.run = run

    def take_model(self, model: Any) -> None:
        """See `_Run`."""
        self.run.takes(model)

    def note_loss(self, loss: Any) -> None:
        """A loss has no value here."""

    def finish(self) -> NoReturn:
        """The books end before the script does."""
        if not self.stops_at_engine:
            self.run.close_books(self.engine)
        super().finish()

    def has_enough(self) -> bool:
        """After the second step."""
        return self.steps >= _STEPS.warmup + _STEPS.timed


def _told(error: BaseException, source: WorkloadSource) -> dict[str, Any]:
    """As `speech.told`, with the script's line: all that happens has it on the stack."""
    if isinstance(error, WorkloadError):
        return {"kind": "user_code", "what": error.what, "where": error.where, "hint": error.hint}
    if isinstance(error, protocol.Refused):
        return told(error, source.path)
    said, place = told(error, source.path), find_raiser(error)
    frames = traceback.extract_tb(error.__traceback__)
    kind = "engine" if frames and "/deepspeed/" in frames[-1].filename else said["kind"]
    where = str(place or said["where"] or source.path)
    if "FakeTensorDeviceMismatchError" in said["what"]:  # a real GPU refuses it just so
        what = "tensors of the CPU and of the GPU meet in one operation"
        return {"kind": "user_code", "what": what, "where": where, "hint": "move the batch to engine.device"}
    what = f"cannot run on the simulated device: {said['what']}"
    return {"kind": kind, "what": what, "where": where, "hint": _HINT}
