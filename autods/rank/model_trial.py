"""The trial of a model in one rank: build it, initialize DeepSpeed, run and time a few optimizer steps.

The simulated GPU runs the same `build`, `initialize` and `optimizer_step`, so that a forecast and a trial differ in the
device alone.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from ..config.checkpointing import offloads_inputs
from ..config.deepspeed import SEQUENCE_RANKS, allow_gathering, count_sharers
from ..types import Exam, Examined, Phase, WorkloadSource
from ..workload.protocol import Workload, WorkloadError
from . import comparable_losses, pipeline
from .checkpointing import set_checkpointing
from .distributed import Ranks, Traffic
from .exam import WorstCaseExam
from .job import RankJob
from .memory import Meter
from .model_facts import check_batch, largest_shape, longest_batch, place, seed_all
from .patching import declare
from .record import RankResult
from .step_recorder import StepRecorder, was_skipped

_WHY = "the weights of a Hugging Face config are drawn on all threads"
_DRAWS = (declare("torch.Tensor.normal_", _WHY), declare("torch.Tensor.uniform_", _WHY))
_LEAST_DRAWN = 4 << 20  # elements; smaller tensors are not worth it
_DRAWN_AT_ONCE = 1 << 20  # with a generator of their own, so that the number of threads does not change them
Observe = Callable[[Phase, int], None]


class SpeedTrial:
    """The training of one rank in a trial. This one measures speed; the exams of a winner derive from it."""

    steps: ModelSteps | pipeline.PipelineSteps

    def __init__(self, workload: Workload, job: RankJob, *, observe: Observe, meter: Meter, ranks: Ranks) -> None:
        self.workload, self.job, self.observe = share_sequences(workload, job.ds_config), job, observe
        self.meter, self.ranks = meter, ranks
        self.traffic, self.recorder = Traffic(meter.synchronize), StepRecorder(job.steps)
        self.engine: Any = None
        self.batches: list[Any] = []  # of an optimizer step, on the engine's device

    def run(self) -> RankResult:
        """Build the model and the engine, run the steps, and conclude.

        Exceptions of the user's code are passed on; WorkloadError says where the workload breaks its contract.
        """
        workload, job = self.workload, self.job
        self.observe("build", 0)
        with drawing_weights(job.source):
            model = build(workload, job.ds_config, checkpointing=job.checkpointing)
        sharers = count_sharers(job.ds_config)
        replicas = Ranks(self.ranks.rank // sharers, self.ranks.world_size // sharers)
        if pipeline.is_pipeline(model):
            replicas = pipeline.data_parallel_ranks(model)
        seed_all(job.seed_of(replicas.rank))  # whoever built the model; the ranks of a replica draw the same batches
        self.batches = self.draw(replicas)

        self.observe("init", 0)
        self.engine = engine = initialize(workload, model, self.make_config())
        del model
        self.batches = [place(batch, engine) for batch in self.batches]
        self.begin()
        self.traffic.listen()
        if pipeline.is_pipeline(engine.module):
            self.steps = pipeline.PipelineSteps(engine, self.batches, self.observe)
        else:
            self.steps = ModelSteps(workload, engine, self.batches, job.accumulation, self.observe)
        run_steps(self.step, self.recorder, self.meter, self.ranks, lambda: was_skipped(engine))
        result = self.conclude()
        communication = self.traffic.describe()
        self.observe("done", len(result.losses))
        return replace(result, communication=communication, steps_s=result.steps_s + (communication.step_s or 0.0))

    def step(self, index: int, *, alone: bool = False) -> Sequence[Any]:
        """Run an optimizer step; return its losses. With `alone` each collective runs alone, and is timed."""
        with self.traffic.step(alone=alone):
            return self.steps.train(index)

    def draw(self, replicas: Ranks) -> list[Any]:
        """Return the batches of an optimizer step."""
        return [check_batch(self.workload.build_batch(self.job.micro_batch), self.job.micro_batch)]

    def make_config(self) -> Mapping[str, Any]:
        """Return the DeepSpeed config of the engine."""
        return self.job.ds_config

    def begin(self) -> None:
        """Prepare the engine for the steps."""

    def conclude(self) -> RankResult:
        """Return the result after the steps. Here each collective of one more step runs alone, and is timed."""
        recorder, steps = self.recorder, self.job.steps
        has_time = recorder.steps_s + 2 * statistics.median(recorder.timed) <= steps.budget_s
        if self.ranks.agree(self.traffic.can_be_timed and steps.most_timed > 1 and has_time):
            self.step(len(recorder.losses), alone=True)
        return recorder.result()


class WorstCaseTrial(SpeedTrial):
    """Trains on the longest batch, evaluates it, saves a checkpoint and loads it."""

    draws = 1  # among which the batch is the longest

    def draw(self, replicas: Ranks) -> list[Any]:
        batch, self.draws = longest_batch(self.workload, self.job.micro_batch)
        return [batch]

    def make_config(self) -> Mapping[str, Any]:
        return allow_gathering(self.job.ds_config)

    def conclude(self) -> RankResult:
        exam = WorstCaseExam(
            engine=self.engine,
            ranks=self.ranks,
            evaluate=self.evaluate,
            observe=self.observe,
            meter=self.meter,
            folder=self.job.shared_folder / "checkpoint",
            index=len(self.recorder.losses),
            examined=Examined(batch_shape=largest_shape(self.batches[0]), draws=self.draws),
            held_bytes=self.recorder.held_bytes,
        )
        while exam.advance():
            self.step(exam.index)
        return self.recorder.result(examined=exam.examined)

    def evaluate(self) -> float | None:
        """Return the loss in evaluation."""
        seed_all(self.job.seed)  # layers of experts choose tokens at random in evaluation, too
        return self.steps.compute_loss(keep_dropout=False)


class ParityTrial(SpeedTrial):
    """Trains on samples that every config gets alike, so that the losses of two configs can be compared."""

    def draw(self, replicas: Ranks) -> list[Any]:
        self.observe = self.watch = comparable_losses.RandomnessWatch(self.observe)
        job = self.job
        return comparable_losses.draw_share(
            self.workload, replicas, micro_batch=job.micro_batch, accumulation=job.accumulation, seed=job.seed
        )

    def begin(self) -> None:
        comparable_losses.make_comparable(self.engine)
        self.updates = comparable_losses.UpdateMeter()
        self.updates.watch(self.engine.basic_optimizer)
        self.gradients = comparable_losses.GradientMeter()
        self.gradients.watch(self.engine)

    def conclude(self) -> RankResult:
        losses = tuple(self.ranks.mean(loss) for loss in self.recorder.losses)
        measured = self.recorder.result(update_size=self.updates.mean(self.ranks), gradient_norms=self.gradients.norms)
        result = replace(measured, losses=losses)
        forward = functools.partial(self.steps.compute_loss, keep_dropout=True)
        comparable_losses.check_deterministic(self.watch.drew, forward, self.ranks)
        return result


TRIALS: Mapping[Exam | None, type[SpeedTrial]] = {
    None: SpeedTrial,
    "worst_case": WorstCaseTrial,
    "parity": ParityTrial,
}


def share_sequences(workload: Workload, ds_config: Mapping[str, Any]) -> Workload:
    """Return the workload whose sequences are shared by as many ranks as the config says."""
    sharers, share = count_sharers(ds_config, SEQUENCE_RANKS), workload.share_sequences
    return workload if sharers == 1 or share is None else share(workload, sharers)


def build(workload: Workload, ds_config: Mapping[str, Any], *, checkpointing: bool | int) -> Any:
    """Build the workload's model, which recomputes its activations as `checkpointing` says, see `Knobs`.

    The config says whether it recomputes from inputs on the host.
    """
    model = workload.build()
    set_checkpointing(model, checkpointing, inputs_on_host=offloads_inputs(ds_config))
    return model


def drawing_weights(source: WorkloadSource, threads: int | None = None) -> AbstractContextManager[None]:
    """Draw the weights of a Hugging Face config on so many threads inside the block, or on torch's."""
    return drawing_in_parallel(threads) if source.form.is_model_config else contextlib.nullcontext()


@contextlib.contextmanager
def drawing_in_parallel(threads: int | None = None) -> Iterator[None]:
    """Draw large tensors of the CPU on so many threads inside the block, or on torch's.

    torch draws on one thread, and transformers draws most weights twice. For 0.8 billion parameters that took 9 of the
    16 s of a trial on an H200. torch's seed decides the values, which are others than torch would draw.
    """
    with contextlib.ExitStack() as patches:
        for patch in _DRAWS:
            patches.enter_context(patch.installed(_draw_in_parallel(patch.original(), threads)))
        yield


def _draw_in_parallel(original: Callable[..., Any], threads: int | None) -> Callable[..., Any]:
    import torch

    def draw(tensor: Any, *bounds: float, generator: Any = None, **named: float) -> Any:
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.dtype == torch.float32
        is_usual = generator is None and tensor.is_cpu and tensor.is_contiguous()
        if not is_plain or not is_usual or tensor.numel() < _LEAST_DRAWN:
            return original(tensor, *bounds, generator=generator, **named)
        seed = int(torch.randint(2**62, ()).item())
        values = tensor.detach().view(-1)

        def draw_chunk(start: int) -> None:
            chunk = values[start : start + _DRAWN_AT_ONCE]
            original(chunk, *bounds, generator=torch.Generator().manual_seed(seed + start), **named)

        with ThreadPoolExecutor(threads or torch.get_num_threads()) as pool:
            list(pool.map(draw_chunk, range(0, len(values), _DRAWN_AT_ONCE)))  # raises what a thread has raised
        return tensor

    return draw


def initialize(workload: Workload, model: Any, ds_config: Mapping[str, Any]) -> Any:
    """Return DeepSpeed's engine around the model, with the workload's optimizer if it has one."""
    import deepspeed

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = workload.build_optimizer(parameters) if workload.build_optimizer else None
    mpu = None if workload.join_ranks is None else workload.join_ranks(model)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameters, optimizer=optimizer, mpu=mpu, config=dict(ds_config)
    )
    return engine


def optimizer_step(workload: Workload, engine: Any, batch: Any, accumulation: int, index: int, observe: Observe) -> Any:
    """Run one optimizer step on a batch that lies on the engine's device; return the loss of its last micro batch."""
    for _ in range(accumulation):
        observe("forward", index)
        loss = _training_loss(workload, engine, batch)
        observe("backward", index)
        engine.backward(loss)
        observe("step", index)
        engine.step()
    return loss


def run_steps(
    step: Callable[[int], Sequence[Any]],
    recorder: StepRecorder,
    meter: Meter,
    ranks: Ranks,
    skipped: Callable[[], bool] = lambda: False,
) -> None:
    """Run warm-up steps, and timed steps until their spread is small or their number or time is spent.

    `step` returns the losses of a step's batches. `skipped` tells whether the optimizer did not run in it.
    Raises WorkloadError as `StepRecorder.record`.
    """
    while not recorder.has_enough(ranks):
        meter.synchronize()
        began = time.perf_counter()
        losses = step(len(recorder.losses))
        meter.synchronize()
        seconds = time.perf_counter() - began
        recorder.record(seconds, [loss.detach() for loss in losses], meter.held_bytes(), skipped=skipped())


@dataclass(slots=True)
class ModelSteps:
    """The steps of DeepSpeed's engine of a plain model."""

    workload: Workload
    engine: Any
    batches: Sequence[Any]
    accumulation: int
    observe: Observe

    def train(self, index: int) -> Sequence[Any]:
        """Run the optimizer step with this index; return the losses of its batches."""
        repeats = self.accumulation // len(self.batches)
        return [
            optimizer_step(self.workload, self.engine, batch, repeats, index, self.observe) for batch in self.batches
        ]

    def compute_loss(self, *, keep_dropout: bool) -> float | None:
        """Return the loss of the first batch without a gradient; None if the model returns none."""
        import torch

        self.engine.train(keep_dropout)
        with torch.no_grad():
            loss = _forward(self.workload, self.engine, self.batches[0])
        self.engine.train()
        return float(loss) if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


def _forward(workload: Workload, engine: Any, batch: Any) -> Any:
    """Run the forward pass; return its loss, which is not checked yet, or the whole output where that has none."""
    if workload.loss is not None:
        return workload.loss(engine, batch)
    output = engine(**batch) if isinstance(batch, Mapping) else engine(*batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return output if loss is None else loss


def _training_loss(workload: Workload, engine: Any, batch: Any) -> Any:
    """Run the forward pass and return its loss. Raises WorkloadError if that is no scalar tensor with a gradient."""
    import torch

    loss = _forward(workload, engine, batch)
    if not isinstance(loss, torch.Tensor):
        names = f" of {', '.join(map(str, loss))}" if isinstance(loss, Mapping) else ""
        raise WorkloadError(
            f"the model returned {type(loss).__name__}{names}, no loss",
            hint="let forward return a scalar loss or an object with .loss, or define loss(model, batch)",
        )
    if loss.numel() != 1:
        raise WorkloadError(
            f"the loss is not a scalar: its shape is {tuple(loss.shape)}", hint="reduce it, with .mean() say"
        )
    if not loss.requires_grad:
        raise WorkloadError(
            "the loss has no gradient: it depends on no parameter that is trained",
            hint="look for .detach(), .item() or torch.no_grad() on the way to it",
        )
    return loss
