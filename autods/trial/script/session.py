"""One script under trial: its steps, its clock, when it has shown enough."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from ...config.deepspeed import BATCH_KEYS, merge, strip_rung_keys, without_monitors
from ...types import Phase
from ...workload.script_source import has_placeholder
from .. import exam
from ..collectives import Traffic, backend
from ..distributed import Ranks, ranks_of
from ..job import RankJob
from ..steps import enough, finite
from .callsite import refusal
from .data import Batches
from .exam import Parity, Proof


@dataclass(slots=True)
class Clock:
    """Told of each call of the engine, in seconds of a monotonic clock.

    A step lasts from the end of the one before to its own end: the data that it waits for is a part of it. Between a
    step and the next training forward a script may evaluate, save and log as well; a stretch in which it was seen to
    evaluate or save is left out as a whole.
    """

    times: list[float] = field(default_factory=list)  # of each optimizer step
    _ended_s: float | None = None  # the last optimizer step; before the first one, the first forward
    _paused_s: float | None = None  # the last call of the engine's step, when no training forward came since
    _forward_s: float | None = None
    _other: bool = False  # the stretch is not only waiting for data
    _aside_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Of all steps."""
        return sum(self.times)

    def forward(self, now: float) -> None:
        """A training forward begins."""
        if self._forward_s is None:
            self._forward_s = now
        if self._ended_s is None:
            self._ended_s = now

    def other(self) -> None:
        """The script evaluates, or saves: what it trains on comes after."""
        self._other, self._forward_s = True, None

    def step(self, now: float, *, boundary: bool, counts: bool = True) -> None:
        """A call of the engine's step has ended; boundary: with it an optimizer step; counts: a whole one."""
        if self._other and self._paused_s is not None and self._forward_s is not None:
            self._aside_s += self._forward_s - self._paused_s
        if boundary:
            if counts:
                self.times.append(now - (now if self._ended_s is None else self._ended_s) - self._aside_s)
            self._aside_s = 0.0
        self.resume(now, boundary=boundary)

    def resume(self, now: float, *, boundary: bool = True) -> None:
        """The next stretch begins; what the trial itself did since the last step is left out as well."""
        if boundary:
            self._ended_s = now
        self._paused_s, self._forward_s, self._other = now, None, False


_SWALLOWED = 3  # times that the script was told to end and went on
_MOST_BACKWARDS = 256  # without a step, by the accumulation: a script may accumulate by itself
_GRACE_S = 10.0  # for what it does on its way out
_ZERO = "zero_optimization"
_NOT_GIVEN = object()
_Done = TypeVar("_Done")


class Enough(BaseException):
    """The trial has what it came for. No Exception, so that `except Exception` lets it pass."""


@dataclass(slots=True)
class Session:
    """One script in one rank. A kind's `install(session)` may change `file` and `merge` before the script starts.

    observer: the rank's, told each phase. leave: ends the rank at once, with a result or with what it died of.
    file: what `{ds_config}` holds. merge: from the config that the script gives to the engine to the one it gets.
    own: from that to what of it is the script's. given: its config, where a library takes it before the engine.
    stood_in: what it asked of a GPU that a CPU rank does without.
    """

    job: RankJob
    slot: int
    observer: Any
    leave: Callable[[dict[str, Any] | BaseException], NoReturn]
    file: dict[str, Any] = field(default_factory=dict)
    merge: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    own: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    given: Mapping[str, Any] | None = None
    stood_in: list[str] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)
    batches: Batches = field(default_factory=Batches)
    traffic: Traffic = field(default_factory=lambda: Traffic(lambda: None))  # calls and bytes: no step of its own
    steps: int = 0  # optimizer steps so far
    losses: list[float] = field(default_factory=list)  # of those that count
    loss: Any = None  # of the last micro batch, a tensor
    engine: Any = None
    facts: dict[str, Any] | None = None
    failure: BaseException | None = None  # what an engine's call raised: whoever catches that trains no more
    over: bool = False
    busy: bool = False  # the trial itself works with the engine
    in_step: bool = False  # the engine's own, which steps its optimizer
    _whole: bool = True  # all batches of this step
    _pid: int = field(default_factory=os.getpid)
    _insisted: int = 0
    _backwards: int = 0  # since the last step
    _proof: Proof | None = None
    _parity: Parity | None = None
    _trained: dict[str, Any] | None = None  # `outcomes.Trained`
    _peaks: dict[str, int | None] | None = None
    _counted: int | None = None  # the steps before the exam

    def __post_init__(self) -> None:
        self.file = dict(self.config)
        self.merge = self.merged

    @property
    def config(self) -> dict[str, Any]:
        """The trial's own; a survey has one rank, whatever the fit has."""
        job = self.job
        return {**job.ds_config, BATCH_KEYS[0]: job.train_batch}

    @property
    def looks_only(self) -> bool:
        """The script is run up to its engine, and no further."""
        return self.job.job == "survey" or self.job.only_build

    def merged(self, users: Mapping[str, Any]) -> dict[str, Any]:
        """The trial's config over the script's own: its keys stay, those of the rung and the batch are ours."""
        config = merge(strip_rung_keys(users), self.config)
        return exam.gathering(config) if self.job.exam == "worst_case" else config

    def final(self, users: Mapping[str, Any], *, own_optimizer: bool) -> dict[str, Any]:
        """The config that the engine gets."""
        config = without_monitors(self.merge(users))
        if own_optimizer:
            config.pop("optimizer", None)
        return config

    def own_config(self, users: Mapping[str, Any], *, from_file: bool) -> dict[str, Any]:
        """The script's config without what `{ds_config}` put into its hands, and without batch sizes: those that it
        makes of its arguments belong to this run. A file of its own says the global batch that it means."""
        given = self.file if has_placeholder(self.job.source.argv, "ds_config") else {}
        base = self.job.source.base_config if isinstance(self.job.source.base_config, Mapping) else {}
        config = _without(self.own(users), given, base)
        kept = BATCH_KEYS[0] if from_file and not given else None
        return {key: value for key, value in config.items() if key not in BATCH_KEYS or key == kept}

    # Told by the hooks.

    def insist(self, *, trains: bool = True) -> None:
        """At every call of the engine: a trial that is over ends, whoever swallowed that; so does one that failed.

        trains: False for what a process that the script started may do as well.
        """
        if os.getpid() != self._pid:
            if not trains:
                return
            raise refusal(
                "it trains in a process that it started itself",
                hint="start no ranks in the script: a trial starts them, with RANK, LOCAL_RANK and WORLD_SIZE set",
            )
        if not self.over and self.failure is None:
            return
        self._insisted += 1
        if self._insisted >= _SWALLOWED:
            self.leave(self.failure or self.result())
        raise self.failure or Enough

    def finish(self) -> NoReturn:
        """End the script; the rank, if the script does not let itself be ended."""
        self.over, self._peaks = True, self.observer.meter.peaks()  # a thread's stack would count as memory
        timer = threading.Timer(_GRACE_S, lambda: self.leave(self.result()))
        timer.daemon = True
        timer.start()
        raise Enough

    def looked(self, facts: dict[str, Any]) -> NoReturn:
        """All that a look is after."""
        import torch

        self.facts = facts
        if self.job.world_size > 1 and torch.distributed.is_initialized():
            torch.distributed.barrier()  # who leaves first would hang up on who still builds
        self.finish()

    def takes(self, model: Any) -> None:
        """The model that the script hands over, before anything is done with it."""

    def began(self, engine: Any) -> None:
        """The engine is there."""
        self.engine = engine
        self.traffic.listen(backend())
        if self.job.exam == "parity":
            self._parity = Parity(self._ranks())
            self._parity.began(engine)

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, training: bool) -> None:
        """A forward begins."""
        now = time.perf_counter()
        if training or not self.steps:
            self.observer("forward", self.steps)
        if not training:
            self.other("evaluate")
            return
        self.clock.forward(now)
        self.traffic.begin()
        self._whole &= self.batches.saw((*args, *kwargs.values()), self.job.micro_batch)
        if self.job.exam == "worst_case":
            self.batches.keep(args, kwargs)
        if self._parity is not None:
            self._next_micro_batch()
            self._parity.forward(args, kwargs)

    def other(self, phase: Phase) -> None:
        """Something between the steps that is no training."""
        self.clock.other()
        self.observer.touch(phase, self.steps)

    def backward(self) -> None:
        """A backward begins. Raises WorkloadError where it looks as if no step would ever come."""
        self.phase("backward")
        self._backwards += 1
        if self._backwards > _MOST_BACKWARDS * self.job.accumulation:
            raise refusal(
                f"it called the engine's backward {self._backwards} times and never its step",
                hint="call engine.step() after each engine.backward(loss): the engine knows when to accumulate",
            )

    def phase(self, phase: Phase) -> None:
        """A part of a training step begins."""
        self.observer(phase, self.steps)

    def forwarded(self, loss: Any) -> None:
        """A training forward has ended, with a loss where the model returns one."""
        if self._parity is not None:
            self._parity.forwarded()
        self.lost(loss)

    def lost(self, loss: Any) -> None:
        """The loss of a micro batch, where it was seen."""
        if loss is not None:
            self.loss = loss.detach()

    def stepped(self, *, boundary: bool) -> None:
        """The engine's step has ended. Ends the script when that was the last one that the trial needs."""
        self._backwards = 0
        self._next_micro_batch()
        if boundary:
            self.observer.meter.synchronize()
            self.traffic.end()
        self.clock.step(time.perf_counter(), boundary=boundary, counts=self._whole)
        if not boundary:
            return
        self.steps += 1
        if self._proof is not None:
            self._prove()
            return
        if self._parity is not None:
            self._parity.stepped()
        elif self._whole and self.loss is not None:
            self.losses.append(finite(self.loss, self.steps - 1))
        self.loss, self._whole = None, True
        if self._has_enough():
            self._prove()

    def _prove(self) -> None:
        """The exam, where there is one: a part of it after each further step."""
        if self.job.exam == "worst_case":
            self._proof = self._proof or self._begun()
            if self._at_work(self._proof.goes_on):
                return
        self._conclude()
        self.finish()

    def _next_micro_batch(self) -> None:
        """Where losses are compared, those of all micro batches count; a trainer's step comes after several."""
        if self._parity is not None:
            self._parity.lost(self.loss)
            self.loss = None

    def _conclude(self) -> None:
        """What the losses of a parity trial belong to; while the ranks can still talk."""
        import torch

        if self._parity is not None and self._trained is None and torch.distributed.is_initialized():
            self.losses, self._trained = self._parity.losses, self._parity.said()

    def parts(self) -> None:
        """The script ends its process group. If it has trained too few steps, its end says so."""
        if self.engine is not None and not self.over and len(self.clock.times) > self.job.steps.warmup:
            self.ended()

    def ended(self) -> None:
        """The script ended by itself: what is left of the exam is done without its steps."""
        if self.job.exam == "worst_case" and not self.over:
            proof = self._proof = self._proof or self._begun()
            self._at_work(proof.ends_without_steps)
            self.over = True
        elif self.job.exam == "parity" and not self.over:
            self._conclude()

    # What it comes to.

    def result(self) -> dict[str, Any]:
        """Of this rank: its facts after a survey, else what its steps showed."""
        if self.job.job == "survey":
            return dict(self.facts or {})
        times = self.clock.times[: self._counted]
        return {
            "step_s": tuple(times[self.job.steps.warmup :]),
            "steps_s": sum(times),
            "losses": tuple(self.losses),
            "examined": None if self._proof is None else self._proof.examined,
            "trained": self._trained,
            "communication": self.traffic.said(),
            "peaks": (self._peaks or self.observer.meter.peaks()) | self.observer.in_steps,
            "tokens_per_sample": self.batches.tokens_per_sample,
        }

    def _has_enough(self) -> bool:
        """By rank 0's word: ranks may not see the same steps as whole, and have to end together."""
        steps, times = self.job.steps, self.clock.times[self.job.steps.warmup :]
        if self.steps < steps.warmup + steps.timed:
            return False
        done = len(times) >= steps.timed and (
            len(times) >= steps.most_timed or enough(times, steps, self.clock.total_s)
        )
        agreed = self._ranks().agree(done)
        self.clock.resume(time.perf_counter())
        return agreed

    def _ranks(self) -> Ranks:
        return ranks_of(self.job, self.slot)

    def _begun(self) -> Proof:
        self._counted = len(self.clock.times)
        return Proof(self.job, self.engine, self.batches, self.observer, self._ranks(), self.steps)

    def _at_work(self, work: Callable[[], _Done]) -> _Done:
        """With the engine in the trial's own hands, off the clock."""
        self.busy = True
        try:
            return work()
        finally:
            self.busy = False
            self.clock.resume(time.perf_counter())


def _without(config: Mapping[str, Any], given: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """The config less the sections that are as they were given; what is in `kept` stays."""
    left = {key: value for key, value in config.items() if key in kept or given.get(key, _NOT_GIVEN) != value}
    if isinstance(zero := left.get(_ZERO), Mapping) and _ZERO in given:  # of its many keys each counts by itself
        left[_ZERO] = _without(zero, given[_ZERO], kept.get(_ZERO) or {})
    return left
