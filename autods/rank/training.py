"""Train a workload for a few optimizer steps: build the model, initialize DeepSpeed, run and time the steps.

The simulated GPU runs the same `build`, `initialize` and `optimizer_step`, so that a forecast and a trial differ in the
device alone.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..types import Examined, Phase, Steps
from ..workload.protocol import Workload, WorkloadError
from . import loss_parity, pipeline
from .distributed import Ranks, Traffic
from .exam import WorstCaseExam, allow_gathering
from .job import RankJob
from .memory import Meter
from .model_facts import check_batch, enable_checkpointing, largest_shape, longest_batch, place, seed_all
from .weights import drawing_in_parallel

Observe = Callable[[Phase, int], None]
_MOST_SKIPPED = 40  # in a row; the largest first loss scale of DeepSpeed is 2**32, and each skipped step halves it


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """What the steps of one rank measured.

    `step_s` has the seconds of each timed step, `steps_s` the seconds of all steps with the warm-up, `losses` one loss
    for each step. `skipped_steps` were further ones that changed no weights, see `was_skipped`. `held_bytes` are those
    in use on the device after each step. `update_size` is that of a parity trial, see `types.Fit`. `examined` is
    `types.Examined` of a worst-case exam. `communication` is `types.Communication` of this rank as a dict.
    """

    step_s: tuple[float, ...] = ()
    steps_s: float = 0.0
    losses: tuple[float, ...] = ()
    skipped_steps: int = 0
    held_bytes: tuple[int, ...] = ()
    update_size: float | None = None
    examined: Examined | None = None
    communication: Mapping[str, Any] | None = None


def train(workload: Workload, job: RankJob, *, observe: Observe, meter: Meter, ranks: Ranks) -> TrainingResult:
    """Train one rank of the job, and pass its exam if it has one.

    A trial that measures speed ends with one more step, in which each collective runs alone and is timed. Exceptions
    of the user's code are passed on; WorkloadError says where the workload breaks its contract.
    """
    observe("build", 0)
    with drawing_in_parallel() if job.source.kind == "hf_config" else contextlib.nullcontext():
        model = build(workload, checkpointing=job.checkpointing)
    replicas = ranks
    if pipeline.is_pipeline(model):
        replicas = pipeline.data_parallel_ranks(model)
        seed_all(job.seed + replicas.rank)  # the stages of a replica draw the same batches
    draws = 1
    match job.exam:
        case "worst_case":
            batch, draws = longest_batch(workload, job.micro_batch)
            batches = [batch]
            del batch
        case "parity":
            batches = loss_parity.draw_share(
                workload, replicas, micro_batch=job.micro_batch, accumulation=job.accumulation, seed=job.seed
            )
            observe = watch = loss_parity.RandomnessWatch(observe)
        case None:
            batches = [check_batch(workload.build_batch(job.micro_batch), job.micro_batch)]
    if job.only_build:
        return TrainingResult()

    observe("init", 0)
    engine = initialize(workload, model, allow_gathering(job.ds_config) if job.exam == "worst_case" else job.ds_config)
    del model
    batches = [place(batch, engine) for batch in batches]
    updates = loss_parity.UpdateMeter()
    if job.exam == "parity":
        loss_parity.make_comparable(engine)
        updates.watch(engine.basic_optimizer)
    traffic = Traffic(meter.synchronize)
    traffic.listen()
    train_step, compute_loss = _engine_steps(workload, engine, batches, job.accumulation, observe)

    def step(index: int, *, alone: bool = False) -> list[Any]:
        with traffic.step(alone=alone):
            return train_step(index)

    def evaluate() -> float | None:
        seed_all(job.seed)  # layers of experts choose tokens at random in evaluation, too
        return compute_loss(False)

    result = run_steps(step, job.steps, meter, ranks, lambda: was_skipped(engine))
    index = len(result.losses)
    match job.exam:
        case "worst_case":
            exam = WorstCaseExam(
                engine=engine,
                ranks=ranks,
                evaluate=evaluate,
                observe=observe,
                meter=meter,
                folder=job.shared_folder / "checkpoint",
                index=index,
                examined=Examined(batch_shape=largest_shape(batches[0]), draws=draws),
                held_bytes=result.held_bytes,
            )
            while exam.advance():
                step(exam.index)
            result = replace(result, examined=exam.examined)
        case "parity":
            losses = tuple(ranks.mean(loss) for loss in result.losses)
            result = replace(result, losses=losses, update_size=updates.mean(ranks))
            loss_parity.check_deterministic(watch.drew, lambda: compute_loss(True), ranks)
        case None:
            has_time = result.steps_s + 2 * statistics.median(result.step_s) <= job.steps.budget_s
            if ranks.agree(traffic.can_be_timed and job.steps.most_timed > 1 and has_time):
                step(index, alone=True)
    communication = traffic.describe()
    observe("done", index)
    steps_s = result.steps_s + (communication["step_s"] or 0.0)
    return replace(result, communication=communication, steps_s=steps_s)


def build(workload: Workload, *, checkpointing: bool) -> Any:
    """Build the workload's model; with `checkpointing` it recomputes its activations."""
    model = workload.build_model()
    if checkpointing:
        enable_checkpointing(model)
    return model


def initialize(workload: Workload, model: Any, ds_config: Mapping[str, Any]) -> Any:
    """Return DeepSpeed's engine around the model, with the workload's optimizer if it has one."""
    import deepspeed

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = workload.build_optimizer(parameters) if workload.build_optimizer else None
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameters, optimizer=optimizer, config=dict(ds_config)
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
    steps: Steps,
    meter: Meter,
    ranks: Ranks,
    skipped: Callable[[], bool] = lambda: False,
) -> TrainingResult:
    """Run warm-up steps, and timed steps until their spread is small or their number or time is spent.

    `step` returns the losses of a step's batches, of which the mean is kept. A step for which `skipped` is true counts
    as neither: the optimizer did not run. Raises WorkloadError for a loss that is not finite, and for steps that are
    skipped without end.
    """
    began = time.perf_counter()
    times: list[float] = []
    losses: list[float] = []
    held_bytes: list[int] = []
    skips = Skips()
    while True:
        index = len(losses)
        meter.synchronize()
        step_began = time.perf_counter()
        step_losses = step(index)
        meter.synchronize()
        step_s = time.perf_counter() - step_began
        loss = statistics.fmean(check_finite(loss, index) for loss in step_losses)
        if skips.count(skipped=skipped()):
            continue
        if index >= steps.warmup:
            times.append(step_s)
        losses.append(loss)
        held_bytes.append(meter.held_bytes())
        if len(times) < steps.timed:
            continue
        # Ranks must stop together. Where the number of steps is fixed there is nothing to agree on.
        if len(times) >= steps.most_timed or ranks.agree(has_enough_steps(times, steps, time.perf_counter() - began)):
            break
    return TrainingResult(
        step_s=tuple(times),
        steps_s=time.perf_counter() - began,
        losses=tuple(losses),
        skipped_steps=skips.total,
        held_bytes=tuple(held_bytes),
    )


@dataclass(slots=True)
class Skips:
    """Counts the optimizer steps that DeepSpeed skipped; `total` is their number."""

    total: int = 0
    _in_a_row: int = 0

    def count(self, *, skipped: bool) -> bool:
        """Count a step, and return `skipped`. Raises WorkloadError when the loss scale does not come to rest."""
        self.total += skipped
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if self._in_a_row > _MOST_SKIPPED:
            raise WorkloadError(
                f"{self._in_a_row} optimizer steps in a row were skipped, because gradients in fp16 overflowed",
                hint="lower fp16.initial_scale_power or fp16.loss_scale, or train in bf16",
            )
        return skipped


def was_skipped(engine: Any) -> bool:
    """Whether the last optimizer step changed no weights: gradients in fp16 overflowed, and the loss scale is halved.

    All ranks get the same answer. DeepSpeed's optimizers and its engine's `skipped_steps` go by this attribute, too.
    """
    return bool(getattr(engine.optimizer, "overflow", False))


def relative_spread(times: Sequence[float]) -> float:
    """Return the relative standard error of the median, (1.2533 σ/√n) / median; 0 for a single time."""
    if len(times) < 2:
        return 0.0
    return 1.2533 * statistics.stdev(times) / math.sqrt(len(times)) / statistics.median(times)


def has_enough_steps(times: Sequence[float], steps: Steps, elapsed_s: float) -> bool:
    """Whether the median step time is precise enough, or the time budget is spent."""
    return relative_spread(times) <= steps.spread or elapsed_s >= steps.budget_s


def check_finite(loss: Any, index: int) -> float:
    """Return the loss of the step with this index as a number. Raises WorkloadError if it is infinite or NaN."""
    value = float(loss.detach())
    if not math.isfinite(value):
        raise WorkloadError(
            f"the loss is {value} at step {index + 1}", hint="check the data, the learning rate and the initialisation"
        )
    return value


def _engine_steps(
    workload: Workload, engine: Any, batches: Sequence[Any], accumulation: int, observe: Observe
) -> tuple[Callable[[int], list[Any]], Callable[[bool], float | None]]:
    """Return two functions.

    The first runs one optimizer step by its index, and returns the losses of its batches.
    The second returns the loss without a gradient, None if the model returns none; its argument keeps dropout on.
    """
    if pipeline.is_pipeline(engine.module):
        return pipeline.engine_steps(engine, batches, observe)

    def train_step(index: int) -> list[Any]:
        repeats = accumulation // len(batches)
        return [optimizer_step(workload, engine, batch, repeats, index, observe) for batch in batches]

    def compute_loss(training: bool) -> float | None:
        import torch

        engine.train(training)
        with torch.no_grad():
            loss = _forward(workload, engine, batches[0])
        engine.train()
        return float(loss) if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None

    return train_step, compute_loss


def _forward(workload: Workload, engine: Any, batch: Any) -> Any:
    """Run the forward pass; return its loss, which is not checked yet."""
    if workload.loss is not None:
        return workload.loss(engine, batch)
    output = engine(**batch) if isinstance(batch, Mapping) else engine(*batch)
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)


def _training_loss(workload: Workload, engine: Any, batch: Any) -> Any:
    """Run the forward pass and return its loss. Raises WorkloadError if that is no scalar tensor with a gradient."""
    import torch

    loss = _forward(workload, engine, batch)
    if not isinstance(loss, torch.Tensor):
        raise WorkloadError(
            f"the model returned {type(loss).__name__}, no loss",
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
