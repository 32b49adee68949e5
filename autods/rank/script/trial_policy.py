"""The policy of a trial: a script's optimizer steps with their times and losses, its exam, its sandbox and its end."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ...config.deepspeed import allow_gathering, without_monitors
from ...system.stacks import find_caller
from ...types import Examined, ModelFacts, Phase, Trained
from ...workload.script_source import has_placeholder
from .. import pipeline
from ..checkpointing import list_recomputing, recomputes
from ..comparable_losses import GradientMeter, UpdateMeter, generator_state, make_comparable
from ..distributed import Ranks, Traffic
from ..exam import WorstCaseExam
from ..job import RankJob
from ..model_facts import count_parameters, shifts_labels
from ..record import RankResult, ScriptEnd
from ..step_recorder import StepRecorder, was_skipped
from . import sandbox
from .batches import Batches, find_loss, iter_tensors
from .overlay import Overlay
from .policy import Injection, Policy
from .user_errors import explain, script_error

_MOST_BACKWARDS = 256  # without a step, for each accumulated micro batch: a script may accumulate by itself
_SUMMED_ELEMENTS = 2**20  # at a time: a copy of a whole embedding may not fit
_LISTED_FILES = 20
_HASH_DIGITS = 10  # hexadecimal; their sum over thousands of ranks is still exact in a float64


class TrialPolicy(Policy):
    """Measures one script in one rank.

    `observer` holds the rank's meter. `leave` ends the rank's process at once, with a result or an error: the script
    gets no say in it. `failure` is what a call of the engine raised: a script that catches it does not train any
    further.
    """

    def __init__(
        self,
        job: RankJob,
        slot: int,
        observer: Any,
        leave: Callable[[ScriptEnd | BaseException], NoReturn],
    ) -> None:
        super().__init__(job, observer)
        self.leave = leave
        self.ranks = Ranks(job.local_ranks[slot], job.world_size)
        self.clock = StepClock()
        self.batches = Batches()
        self.traffic = Traffic(lambda: None)  # counts calls and bytes; no step measures their seconds
        self._steps = 0
        self._overlay: Overlay | None = None
        self.recorder = StepRecorder(job.steps)  # of the steps before the exam
        self._loss: Any = None  # of the last micro batch, a tensor
        self._whole = True  # all batches of this step are whole
        self._backwards = 0  # since the last step
        self._parity = ParityRecorder(self.ranks) if job.exam == "parity" else None
        self._exam: WorstCaseExam | None = None
        self._trained: Trained | None = None
        self._update_size: float | None = None  # of a parity trial, see `types.Fit`
        self._exam_is_over = False

    @property
    def step(self) -> int:
        """The optimizer steps of this trial, whatever the script has restored."""
        return self._steps

    # The process.

    def prepare(self, injection: Injection) -> None:
        """Keep the script's traces out of the user's world, and watch its data loaders."""
        if self.job.job == "survey":
            pipeline.build_all_layers()
        self.batches.watch_loaders()
        self._overlay, self.writes_confined = sandbox.install(self, self.ranks.rank)

    def conclude(self) -> None:
        """The script ended by itself. Raises WorkloadError where it ended too early."""
        self._list_writes()
        super().conclude()
        steps, needed = len(self.recorder.times), self.job.steps.warmup + 1
        if steps < needed:
            raise script_error(
                f"it ended after {steps} optimizer step{'s' * (steps != 1)} of micro batch {self.job.micro_batch}, "
                f"and a trial needs at least {needed}",
                hint="give it more data, more epochs or a larger max_steps after --",
            )
        self.finish_exam()

    def leave_group(self) -> None:
        """Finish the exam while the ranks can still communicate."""
        if self.engine is not None and len(self.recorder.times) > self.job.steps.warmup:
            self.finish_exam()

    # Calls of the engine.

    def check_goes_on(self) -> None:
        """Leave where the script goes on after a failure of its engine."""
        super().check_goes_on()
        if self.failure is not None:
            self.leave(explain(self.failure, self.job.device, writes_confined=self.writes_confined))

    @contextlib.contextmanager
    def watch_call(self) -> Iterator[None]:
        """A call of the engine. Its exception is the failure of the script, even if the script catches it."""
        self.check_goes_on()
        try:
            yield
        except BaseException as error:
            self.failure = error
            raise

    # Before training.

    def adapt_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Without monitors. A trial that saves may gather the weights."""
        plain = without_monitors(config)
        return allow_gathering(plain) if self.job.exam == "worst_case" else plain

    def begin_engine(self, injection: Injection, arguments: Mapping[str, Any], config: Any, *, from_file: bool) -> None:
        """Stop here where only the facts of the model are needed."""
        self.take_model(arguments["model"])
        if self.job.stops_at_engine:
            self._stop_with_facts(self._describe_model(injection, arguments, config, from_file=from_file))

    def take_model(self, model: Any) -> None:
        """The script passes its model to DeepSpeed; a forecast overrides this."""

    def _describe_model(
        self, injection: Injection, arguments: Mapping[str, Any], config: Any, *, from_file: bool
    ) -> ModelFacts:
        """The facts of the script's model. Raises WorkloadError when the script gives no readable config."""
        if config is None:
            problem = "a config that cannot be read" if arguments["config"] or arguments["args"] else "no config"
            raise script_error(
                f"it gives deepspeed.initialize {problem}",
                hint="give it config=…, or args with deepspeed_config: `--deepspeed_config {ds_config}` after --",
            )
        in_script = not from_file and injection.config.given is None and not injection.config.comes_filled_in(config)
        return ModelFacts(
            **count_parameters(arguments["model"], by="the script gave deepspeed.initialize"),
            checkpointing=not self.job.source.keeps_checkpointing and bool(list_recomputing(arguments["model"])),
            recomputes=recomputes(arguments["model"]),
            tokens_per_sample=None,
            has_optimizer=arguments["optimizer"] is not None,
            config=injection.config.own_part(config, from_file=from_file),
            config_place=str(find_caller() or "") if in_script else None,
            stood_in=tuple(injection.stand_ins),
            warnings=tuple(injection.warnings),
            writes_confined=self.writes_confined,
        )

    def _stop_with_facts(self, facts: ModelFacts) -> NoReturn:
        """End a script of which only the facts of its model are needed."""
        import torch

        if self.job.world_size > 1 and torch.distributed.is_initialized():
            torch.distributed.barrier()  # a rank that leaves early breaks the connections of those that still build
        self._end(facts)

    def start_training(self, engine: Any) -> None:
        """Count the engine's communication from now on."""
        super().start_training(engine)
        self.traffic.listen()
        if self._parity is not None:
            self._parity.start(engine)

    def evaluate_with(self, forward: Callable[..., Any]) -> None:
        """The exam evaluates its batch in this way."""
        self.batches.forward = forward

    # Parts of a training step.

    def begin_other(self, phase: Phase) -> None:
        """The script evaluates or saves between its steps, which no step's time includes."""
        self.clock.interrupt()
        self.observer.touch(phase, self.step)

    def begin_skipped(self, phase: Phase) -> None:
        """The script evaluates or saves, which the trial skips. A process that the script forked may do so too."""
        if os.getpid() == self._pid:
            self.check_goes_on()
        self.begin_other(phase)

    def begin_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, training: bool) -> None:
        """A forward begins. Raises WorkloadError when the first batch has the wrong size."""
        now = time.perf_counter()
        if training or not self.step:
            self.begin_phase("forward")
        if not training:
            self.begin_other("evaluate")
            return
        self.clock.begin_forward(now)
        self.traffic.begin()
        decodes = shifts_labels(self.engine.module)
        self._whole &= self.batches.check(
            (*args, kwargs),
            self.job.micro_batch,
            shifts_labels=decodes,
            takes_size=has_placeholder(self.job.source.argv, "micro_batch_size"),
        )
        if self.job.exam == "worst_case" and self._exam is None:  # the exam evaluates one batch, before and after
            self.batches.keep_longest(args, kwargs)
        if self._parity is not None:
            self._parity.add_loss(self._loss)  # of the last micro batch: a trainer's step comes after several
            self._loss = None
            self._parity.begin_forward(args, kwargs)

    def end_forward(self, output: Any) -> None:
        if self._parity is not None:
            self._parity.end_forward()
        self.note_loss(output)

    def begin_backward(self, loss: Any) -> None:
        """A backward begins. Raises WorkloadError when the script never seems to step."""
        self.begin_phase("backward")
        self._backwards += 1
        if self._backwards > _MOST_BACKWARDS * self.job.accumulation:
            raise script_error(
                f"it called the engine's backward {self._backwards} times and never its step",
                hint="call engine.step() after each engine.backward(loss): the engine knows when to accumulate",
            )
        self.note_loss(loss)

    def note_loss(self, output: Any) -> None:
        """Keep the loss of a micro batch, if the output has one."""
        if (loss := find_loss(output)) is not None:
            self._loss = loss.detach()

    def end_step(self, *, boundary: bool) -> None:
        """The engine's step has ended; `boundary`: it was an optimizer step. Ends the script after the last one.

        Raises WorkloadError for steps that are skipped without end.
        """
        self._backwards = 0
        if boundary:
            self.observer.meter.synchronize()
            self.traffic.end()
        seconds = self.clock.end_step(time.perf_counter(), boundary=boundary)
        if not boundary:
            return
        self._steps += 1
        self.batches.end_step(is_whole=self._whole)
        if self._exam is None:
            self._record_step(seconds)
            if not self.has_enough():
                return
        if self.job.exam == "worst_case":
            with self.pause_hooks():
                goes_on = self._begin_exam().advance()
            self.clock.resume(time.perf_counter())
            if goes_on:
                return
        self._conclude_parity()
        self.finish()

    def _record_step(self, seconds: float) -> None:
        losses = [self._loss] if self._whole and self._loss is not None else []
        if self._parity is not None:
            self._parity.add_loss(self._loss)
            losses = self._parity.end_step()
        self.recorder.record(
            seconds,
            losses,
            self.observer.meter.held_bytes(),
            skipped=was_skipped(self.engine),
            is_whole=self._whole,
        )
        self._loss, self._whole = None, True

    def has_enough(self) -> bool:
        """Whether no more timed steps are needed."""
        has_enough = self.recorder.has_enough(self.ranks)
        self.clock.resume(time.perf_counter())
        return has_enough

    # The end.

    def finish(self) -> NoReturn:
        """The trial is over: end the rank with its measurements."""
        self._end(self.result())

    def _end(self, end: ScriptEnd) -> NoReturn:
        self._list_writes()
        self.observer("done", self.step)
        self.leave(end)

    def _list_writes(self) -> None:
        if self._overlay is not None and self._overlay.written:
            written = ", ".join(list(self._overlay.written)[:_LISTED_FILES])
            print(f"autods: kept out of your folders: {written}", flush=True)

    def finish_exam(self) -> None:
        """The script ended by itself, or ends its process group: do the rest of the exam without further steps."""
        if self.job.exam == "worst_case" and not self._exam_is_over:
            with self.pause_hooks():
                self._begin_exam().finish_without_steps()
            self._exam_is_over = True
        self._conclude_parity()

    def result(self) -> RankResult:
        """The measurements of this rank's steps."""
        samples = self.batches.whole_steps * self.job.micro_batch * self.job.accumulation  # of this rank
        return self.recorder.result(
            examined=None if self._exam is None else self._exam.examined,
            trained=self._trained,
            update_size=self._update_size,
            gradient_norms=() if self._parity is None else self._parity.gradients.norms,
            communication=self.traffic.describe(),
            tokens_per_sample=self.batches.tokens / samples if samples else None,
        )

    def _begin_exam(self) -> WorstCaseExam:
        if self._exam is None:
            self._exam = WorstCaseExam(
                engine=self.engine,
                ranks=self.ranks,
                evaluate=lambda: self.batches.evaluate(self.engine),
                observe=self.observer,
                meter=self.observer.meter,
                folder=self.job.shared_folder / "checkpoint",
                index=self.step,
                examined=Examined(batch_shape=self.batches.longest_shape, draws=self.batches.seen),
                held_bytes=self.recorder.held_bytes,
            )
        return self._exam

    def _conclude_parity(self) -> None:
        """Collect what all ranks have trained on, while they can still communicate."""
        import torch

        if self._parity is not None and self._trained is None and torch.distributed.is_initialized():
            self._trained = self._parity.describe()
            self._update_size = self._parity.updates.mean(self.ranks)


@dataclass(slots=True)
class StepClock:
    """Times optimizer steps, from the calls of the engine with their times in seconds of a monotonic clock.

    A step begins when the last one ends, so the wait for its data is included. Between two steps a script may
    evaluate, save and log. A stretch in which it evaluates or saves is left out as a whole.
    """

    _began_s: float | None = None  # of this optimizer step, later by what was left out of it
    _paused_s: float = 0.0  # end of the last call of the engine's step, or of what was left out since then
    _interrupted: bool = False

    def begin_forward(self, now: float) -> None:
        """A training forward begins."""
        if self._began_s is None:
            self.resume(now)
        elif self._interrupted:
            self._began_s += now - self._paused_s
            self._paused_s, self._interrupted = now, False

    def interrupt(self) -> None:
        """The script evaluates or saves before its next training forward."""
        self._interrupted = True

    def end_step(self, now: float, *, boundary: bool) -> float:
        """A call of the engine's step has ended; `boundary`: it was an optimizer step. Return the seconds of this."""
        seconds = 0.0 if self._began_s is None else now - self._began_s
        self.resume(now, boundary=boundary)
        return seconds

    def resume(self, now: float, *, boundary: bool = True) -> None:
        """The next stretch begins; the time since the last step counts for none."""
        if boundary:
            self._began_s = now
        self._paused_s, self._interrupted = now, False


@dataclass(slots=True)
class ParityRecorder:
    """Records the samples and losses of a parity trial, so that the trials of two configs can be compared.

    `weights` is the sum of the magnitudes of the whole model's weights before the first step; None where a part of them
    lies on NVMe. `updates` and `gradients` measure the steps after `start`.
    """

    ranks: Ranks
    weights: float | None = None
    updates: UpdateMeter = field(default_factory=UpdateMeter)
    gradients: GradientMeter = field(default_factory=GradientMeter)
    _samples: Any = field(default_factory=hashlib.sha256)
    _saw_tensors: bool = False
    _generators: bytes = b""
    _step_losses: list[float] = field(default_factory=list)

    def start(self, engine: Any) -> None:
        """Make the engine's losses comparable, and note its weights. Raises Incomparable for mixtures of experts."""
        make_comparable(engine)
        self.updates.watch(engine.basic_optimizer)
        self.gradients.watch(engine)
        self.weights = _sum_magnitudes(engine.module, self.ranks)

    def begin_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        import torch

        for tensor in iter_tensors((args, kwargs)):
            self._saw_tensors = True
            self._samples.update(repr((tuple(tensor.shape), str(tensor.dtype))).encode())
            if tensor.numel():
                plain = tensor.detach().cpu().contiguous()
                self._samples.update(plain.view(-1).view(torch.uint8).numpy().tobytes())
        self._generators = generator_state()

    def end_forward(self) -> None:
        """A training forward has ended. If it drew random numbers, the generators' state is part of the samples."""
        if generator_state() != self._generators:
            self._samples.update(self._generators)

    def add_loss(self, loss: Any) -> None:
        """The loss of a micro batch; None if it is not known."""
        if loss is not None:
            self._step_losses.append(float(loss))

    def end_step(self) -> list[float]:
        """Return the mean loss of an optimizer step's micro batches on all ranks, if one is known.

        Every rank has to call this.
        """
        total, count = self.ranks.mean(sum(self._step_losses)), self.ranks.mean(float(len(self._step_losses)))
        self._step_losses = []
        return [total / count] if count else []

    def describe(self) -> Trained:
        """Return what was trained on. Every rank has to call this."""
        number = float(int(self._samples.hexdigest()[:_HASH_DIGITS], 16))
        all_saw = self.ranks.mean(float(self._saw_tensors)) == 1
        return Trained(samples=f"{self.ranks.mean(number):.6f}" if all_saw else None, weights=self.weights)


def _sum_magnitudes(model: Any, ranks: Ranks) -> float | None:
    """The sum over all ranks' parts of the weights; None where a part lies on NVMe."""

    def sum_chunks(tensor: Any) -> float:
        flat = tensor.detach().reshape(-1)
        return sum(float(chunk.double().abs().sum()) for chunk in flat.split(_SUMMED_ELEMENTS))

    total = 0.0
    for parameter in model.parameters():
        part = getattr(parameter, "ds_tensor", None)
        if part is None:
            total += sum_chunks(parameter) / ranks.world_size  # every rank has all of it
            continue
        if str(getattr(part, "final_location", None)).endswith("nvme"):
            return None
        begin = part.ds_numel * ranks.rank
        total += sum_chunks(part[: max(0, parameter.ds_numel - begin)])  # the rest is padding
    return ranks.mean(total) * ranks.world_size
