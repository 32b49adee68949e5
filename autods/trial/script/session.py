"""A script under trial: its optimizer steps, their times, its exam, and its end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ...types import Examined, Phase
from ..distributed import Ranks, Traffic
from ..exam import WorstCaseExam
from ..job import RankJob
from ..training import check_finite, has_enough_steps
from .data import Batches
from .engine_config import EngineConfig, stops_at_engine
from .exam import LossRecorder
from .user_errors import script_error

_MOST_BACKWARDS = 256  # without a step, for each accumulated micro batch: a script may accumulate by itself
_MOST_IGNORED_ENDS = 3  # times that the script catches its end and calls the engine again
_GRACE_S = 10.0  # for the script's own work on its way out
_Result = TypeVar("_Result")
Result = dict[str, Any]


class Enough(BaseException):
    """The trial has measured enough. It is not an Exception, so that `except Exception` does not catch it."""


class ScriptEnd:
    """Ends a script: `Enough` is raised in it, and again when it catches that.

    `leave` ends the rank at once, with a result or an error. `failure` is the exception that a call of the engine
    raised; a script that catches it does not train any further.
    """

    def __init__(self, leave: Callable[[Result | BaseException], NoReturn]) -> None:
        self.leave = leave
        self.failure: BaseException | None = None
        self.reached = False
        self._ignored = 0
        self._pid = os.getpid()

    def check(self, result: Callable[[], Result], *, trains: bool = True) -> None:
        """Raise again in a script whose end was reached or whose engine failed; leave when it ignores that repeatedly.

        `trains` is false for calls that a process forked by the script may make as well.
        """
        if os.getpid() != self._pid:
            if not trains:
                return
            raise script_error(
                "it trains in a process that it started itself",
                hint="start no ranks in the script: a trial starts them, with RANK, LOCAL_RANK and WORLD_SIZE set",
            )
        if not self.reached and self.failure is None:
            return
        self._ignored += 1
        if self._ignored >= _MOST_IGNORED_ENDS:
            self.leave(self.failure or result())
        raise self.failure or Enough

    def reach(self, result: Callable[[], Result]) -> NoReturn:
        """End the script, and the rank after a grace period."""
        self.reached = True
        timer = threading.Timer(_GRACE_S, lambda: self.leave(result()))
        timer.daemon = True
        timer.start()
        raise Enough


class Session:
    """Measures one script in one rank. The engine's hooks call it at each event, on every rank alike.

    `observer` gets each phase, and holds the rank's meter. `stand_ins` collects uses of a GPU that a
    CPU rank skips. A library's integration replaces `config` before the script starts.
    """

    def __init__(
        self, job: RankJob, slot: int, observer: Any, leave: Callable[[Result | BaseException], NoReturn]
    ) -> None:
        self.job, self.slot, self.observer = job, slot, observer
        self.config = EngineConfig(job)
        self.end = ScriptEnd(leave)
        self.clock = StepClock()
        self.batches = Batches()
        self.traffic = Traffic(lambda: None)  # counts calls and bytes; no step measures their seconds
        self.stand_ins: list[str] = []
        self.steps = 0  # optimizer steps so far
        self.engine: Any = None
        self.facts: Result | None = None
        self.hooks_paused = False  # the exam, or a pipeline itself, calls the engine
        self.in_engine_step = False  # the engine steps its optimizer itself
        self._losses: list[float] = []  # of steps with whole batches
        self._loss: Any = None  # of the last micro batch, a tensor
        self._whole = True  # all batches of this step are whole
        self._backwards = 0  # since the last step
        self._recorder: LossRecorder | None = None
        self._exam: WorstCaseExam | None = None
        self._steps_before_exam: int | None = None
        self._trained: Result | None = None  # `types.Trained`
        self._peaks: dict[str, int | None] | None = None

    @property
    def stops_at_engine(self) -> bool:
        """Whether the script runs up to the creation of its engine only."""
        return stops_at_engine(self.job)

    # Before training.

    def check_goes_on(self, *, trains: bool = True) -> None:
        """Call this before each call of the engine: see `ScriptEnd.check`."""
        self.end.check(self.result, trains=trains)

    def take_model(self, model: Any) -> None:
        """The script passes its model to DeepSpeed; a forecast overrides this."""

    def stop_with_facts(self, facts: Result) -> NoReturn:
        """End a script of which only the facts of its model are needed."""
        import torch

        self.facts = facts
        if self.job.world_size > 1 and torch.distributed.is_initialized():
            torch.distributed.barrier()  # a rank that leaves early breaks the connections of those that still build
        self.finish()

    def start_training(self, engine: Any) -> None:
        """The engine exists."""
        self.engine = engine
        self.traffic.listen()
        if self.job.exam == "parity":
            self._recorder = LossRecorder(self._ranks())
            self._recorder.start(engine)

    # Parts of a training step.

    def begin_phase(self, phase: Phase) -> None:
        """A part of a training step begins."""
        self.observer(phase, self.steps)

    def begin_other(self, phase: Phase) -> None:
        """The script evaluates or saves between its steps."""
        self.clock.interrupt()
        self.observer.touch(phase, self.steps)

    def begin_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, training: bool) -> None:
        """A forward begins. Raises WorkloadError when the first batch has the wrong size."""
        now = time.perf_counter()
        if training or not self.steps:
            self.begin_phase("forward")
        if not training:
            self.begin_other("evaluate")
            return
        self.clock.begin_forward(now)
        self.traffic.begin()
        self._whole &= self.batches.check((*args, *kwargs.values()), self.job.micro_batch)
        if self.job.exam == "worst_case":
            self.batches.keep_longest(args, kwargs)
        if self._recorder is not None:
            self._end_micro_batch()
            self._recorder.begin_forward(args, kwargs)

    def end_forward(self, loss: Any) -> None:
        """A training forward has ended; `loss` is None where the model returns none."""
        if self._recorder is not None:
            self._recorder.end_forward()
        self.note_loss(loss)

    def begin_backward(self) -> None:
        """A backward begins. Raises WorkloadError when the script never seems to step."""
        self.begin_phase("backward")
        self._backwards += 1
        if self._backwards > _MOST_BACKWARDS * self.job.accumulation:
            raise script_error(
                f"it called the engine's backward {self._backwards} times and never its step",
                hint="call engine.step() after each engine.backward(loss): the engine knows when to accumulate",
            )

    def note_loss(self, loss: Any) -> None:
        """The loss of a micro batch, where it is known."""
        if loss is not None:
            self._loss = loss.detach()

    def end_step(self, *, boundary: bool) -> None:
        """The engine's step has ended; `boundary`: it was an optimizer step. Ends the script after the last one."""
        self._backwards = 0
        self._end_micro_batch()
        if boundary:
            self.observer.meter.synchronize()
            self.traffic.end()
        self.clock.end_step(time.perf_counter(), boundary=boundary, counts=self._whole)
        if not boundary:
            return
        self.steps += 1
        if self._exam is None:
            if self._recorder is not None:
                self._recorder.end_step()
            elif self._whole and self._loss is not None:
                self._losses.append(check_finite(self._loss, self.steps - 1))
            self._loss, self._whole = None, True
            if not self.has_enough():
                return
        if self.job.exam == "worst_case" and self._off_the_clock(self._begin_exam().advance):
            return
        self._conclude_parity()
        self.finish()

    def _end_micro_batch(self) -> None:
        """A parity trial records the loss of every micro batch: a trainer's step comes after several of them."""
        if self._recorder is not None:
            self._recorder.add_loss(self._loss)
            self._loss = None

    def has_enough(self) -> bool:
        """Whether no more timed steps are needed.

        Rank 0 decides for all: ranks have to end together, and may disagree about which steps were whole.
        """
        steps, times = self.job.steps, self.clock.times[self.job.steps.warmup :]
        if self.steps < steps.warmup + steps.timed:
            return False
        done = len(times) >= steps.timed and (
            len(times) >= steps.most_timed or has_enough_steps(times, steps, self.clock.total_s)
        )
        agreed = self._ranks().agree(done)
        self.clock.resume(time.perf_counter())
        return agreed

    # The end.

    def finish(self) -> NoReturn:
        """End the script. The peaks are read first: the thread that ends the rank would count as memory."""
        self._peaks = self.observer.meter.peaks()
        self.end.reach(self.result)

    def end_process_group(self) -> None:
        """The script ends its process group, and after that ranks cannot communicate: finish the exam."""
        if self.engine is not None and not self.end.reached and len(self.clock.times) > self.job.steps.warmup:
            self.finish_exam()

    def finish_exam(self) -> None:
        """The script ended by itself: do the rest of the exam without further steps."""
        if self.end.reached:
            return
        if self.job.exam == "worst_case":
            self._off_the_clock(self._begin_exam().finish_without_steps)
            self.end.reached = True
        elif self.job.exam == "parity":
            self._conclude_parity()

    def result(self) -> Result:
        """The facts of the model after a survey, else the measurements of this rank's steps."""
        if self.job.job == "survey":
            return dict(self.facts or {})
        times = self.clock.times[: self._steps_before_exam]
        return {
            "step_s": tuple(times[self.job.steps.warmup :]),
            "steps_s": sum(times),
            "losses": tuple(self._losses),
            "examined": None if self._exam is None else asdict(self._exam.examined),
            "trained": self._trained,
            "communication": self.traffic.describe(),
            "peaks": (self._peaks or self.observer.meter.peaks()) | self.observer.training_peaks,
            "tokens_per_sample": self.batches.tokens_per_sample,
        }

    def _begin_exam(self) -> WorstCaseExam:
        if self._exam is None:
            self._steps_before_exam = len(self.clock.times)
            self._exam = WorstCaseExam(
                engine=self.engine,
                ranks=self._ranks(),
                evaluate=lambda: self.batches.evaluate(self.engine),
                observe=self.observer,
                synchronize=self.observer.meter.synchronize,
                folder=Path(self.job.checkpoints or self.job.scratch) / "checkpoint",
                index=self.steps,
                examined=Examined(batch_shape=self.batches.longest_shape, draws=self.batches.seen),
            )
        return self._exam

    def _conclude_parity(self) -> None:
        """Collect the losses of all ranks, while they can still communicate."""
        import torch

        if self._recorder is not None and self._trained is None and torch.distributed.is_initialized():
            self._losses, self._trained = self._recorder.losses, self._recorder.describe()

    def _off_the_clock(self, work: Callable[[], _Result]) -> _Result:
        """Run the trial's own work with the engine; its time counts for no step."""
        self.hooks_paused = True
        try:
            return work()
        finally:
            self.hooks_paused = False
            self.clock.resume(time.perf_counter())

    def _ranks(self) -> Ranks:
        return Ranks(self.job.local_ranks[self.slot], self.job.world_size)


@dataclass(slots=True)
class StepClock:
    """Times optimizer steps, from the calls of the engine with their times in seconds of a monotonic clock.

    A step begins when the last one ends, so the wait for its data is included. Between two steps a script may
    evaluate, save and log. A stretch in which it evaluates or saves is left out as a whole.
    """

    times: list[float] = field(default_factory=list)  # seconds of each optimizer step
    _ended_s: float | None = None  # end of the last optimizer step; before the first, the first forward
    _paused_s: float | None = None  # end of the last call of the engine's step
    _forward_s: float | None = None  # first training forward since then
    _interrupted: bool = False
    _left_out_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of all steps."""
        return sum(self.times)

    def begin_forward(self, now: float) -> None:
        """A training forward begins."""
        if self._forward_s is None:
            self._forward_s = now
        if self._ended_s is None:
            self._ended_s = now

    def interrupt(self) -> None:
        """The script evaluates or saves before its next training forward."""
        self._interrupted, self._forward_s = True, None

    def end_step(self, now: float, *, boundary: bool, counts: bool = True) -> None:
        """A call of the engine's step has ended; `boundary`: it was an optimizer step; `counts`: of whole batches."""
        if self._interrupted and self._paused_s is not None and self._forward_s is not None:
            self._left_out_s += self._forward_s - self._paused_s
        if boundary:
            if counts:
                self.times.append(now - (now if self._ended_s is None else self._ended_s) - self._left_out_s)
            self._left_out_s = 0.0
        self.resume(now, boundary=boundary)

    def resume(self, now: float, *, boundary: bool = True) -> None:
        """The next stretch begins; the time since the last step counts for none."""
        if boundary:
            self._ended_s = now
        self._paused_s, self._forward_s, self._interrupted = now, None, False
