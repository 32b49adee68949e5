"""Train a workload for a few optimizer steps: build the model, initialize DeepSpeed, run and time the steps.

The simulated GPU runs the same `build`, `initialize` and `optimizer_step`, so that a forecast and a trial differ in the
device alone.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..types import Phase, Steps
from ..workload.protocol import Workload, WorkloadError
from . import loss_parity, pipeline
from .collectives import Traffic, backend
from .distributed import Ranks
from .exam import EngineOps, allow_gathering, examine
from .job import RankJob
from .model_facts import LongestBatch, check_batch, enable_checkpointing, longest_batch, place, seed_all

Observe = Callable[[Phase, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """What the steps of one rank measured.

    `step_s` has the seconds of each timed step, `steps_s` the seconds of all steps with the warm-up, `losses` one loss
    for each step. `examined` is `types.Examined` as a dict, after a worst-case exam. `communication` is
    `types.Communication` of this rank as a dict.
    """

    step_s: tuple[float, ...] = ()
    steps_s: float = 0.0
    losses: tuple[float, ...] = ()
    examined: Mapping[str, Any] | None = None
    communication: Mapping[str, Any] | None = None


def train(
    workload: Workload, job: RankJob, *, observe: Observe, synchronize: Callable[[], None], ranks: Ranks
) -> TrainingResult:
    """Train one rank of the job, and pass its exam if it has one.

    A trial that measures speed ends with one more step, in which each collective runs alone and is timed. Exceptions
    of the user's code are passed on; WorkloadError says where the workload breaks its contract.
    """
    observe("build", 0)
    model = build(workload, checkpointing=job.checkpointing)
    replicas = ranks
    if pipeline.is_pipeline(model):
        replicas = pipeline.data_parallel_ranks(model, ranks)
        seed_all(job.seed + replicas.rank)  # the stages of a replica draw the same batches
    longest: LongestBatch | None = None
    if job.exam == "worst_case":
        longest = longest_batch(workload, job.micro_batch)
        batches = [longest.batch]
    elif job.exam == "parity":
        batches = loss_parity.draw_share(
            workload, replicas, micro_batch=job.micro_batch, accumulation=job.accumulation, seed=job.seed
        )
        loss_parity.check_comparable(model)
        loss_parity.turn_off_dropout(model)
        observe = watch = loss_parity.RandomnessWatch(observe)
    else:
        batches = [check_batch(workload.build_batch(job.micro_batch), job.micro_batch)]
    if job.only_build:
        return TrainingResult()

    observe("init", 0)
    engine = initialize(workload, model, allow_gathering(job.ds_config) if longest else job.ds_config)
    del model
    batches = [place(batch, engine) for batch in batches]
    train_step, compute_loss = _engine_steps(workload, engine, batches, job.accumulation, observe)
    traffic = Traffic(synchronize)
    traffic.listen(backend())

    def step(index: int, *, alone: bool = False) -> list[Any]:
        with traffic.step(alone=alone):
            return train_step(index)

    if job.exam == "parity":
        loss_parity.reset_step_counts(engine.basic_optimizer)
        result = run_steps(step, lambda losses: loss_parity.mean_loss(losses, ranks), job.steps, synchronize, ranks)
        loss_parity.check_deterministic(watch.drew, lambda: compute_loss(True), ranks)
    else:
        result = run_steps(step, _last_loss, job.steps, synchronize, ranks)
    if longest:
        ops = EngineOps(
            step=step,
            evaluate=lambda: _evaluate_seeded(job.seed, lambda: compute_loss(False)),
            observe=observe,
            synchronize=synchronize,
        )
        folder, index = Path(job.checkpoints or job.scratch) / "checkpoint", len(result.losses)
        result = replace(result, examined=examine(engine, ops, ranks, longest=longest, folder=folder, index=index))
    if job.exam is None and ranks.agree(traffic.can_be_timed and _has_time_for_one_more(result, job.steps)):
        step(len(result.losses), alone=True)
    communication = traffic.describe()
    steps_s = result.steps_s + (communication["step_s"] or 0.0)
    observe("done", len(result.losses))
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


def evaluate(workload: Workload, engine: Any, batch: Any, *, training: bool = False) -> float | None:
    """Compute the loss without a gradient and leave the engine in training mode.

    `training` keeps dropout on. None if the model returns no loss in evaluation.
    """
    import torch

    engine.train(training)
    with torch.no_grad():
        loss = _forward(workload, engine, batch)
    engine.train()
    return float(loss) if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


def run_steps(
    step: Callable[[int], Sequence[Any]],
    join: Callable[[Sequence[float]], float],
    steps: Steps,
    synchronize: Callable[[], None],
    ranks: Ranks,
) -> TrainingResult:
    """Run warm-up steps, and timed steps until their spread is small or their number or time is spent.

    `step` returns the losses of a step's batches, `join` makes one loss of them. Raises WorkloadError for a loss that
    is not finite.
    """
    began = time.perf_counter()
    times: list[float] = []
    losses: list[float] = []
    while True:
        index = len(losses)
        synchronize()
        step_began = time.perf_counter()
        step_losses = step(index)
        synchronize()
        if index >= steps.warmup:
            times.append(time.perf_counter() - step_began)
        losses.append(join([check_finite(loss, index) for loss in step_losses]))
        if len(times) < steps.timed:
            continue
        # Ranks must stop together. Where the number of steps is fixed there is nothing to agree on.
        if len(times) >= steps.most_timed or ranks.agree(has_enough_steps(times, steps, time.perf_counter() - began)):
            break
    return TrainingResult(step_s=tuple(times), steps_s=time.perf_counter() - began, losses=tuple(losses))


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


def _has_time_for_one_more(result: TrainingResult, steps: Steps) -> bool:
    """Whether the trial measures speed, and its budget leaves room for a step of about twice the usual length."""
    step_s = statistics.median(result.step_s) if result.step_s else result.steps_s / len(result.losses)
    return steps.most_timed > 1 and result.steps_s + 2 * step_s <= steps.budget_s


def _last_loss(losses: Sequence[float]) -> float:
    return losses[-1]


def _engine_steps(
    workload: Workload, engine: Any, batches: Sequence[Any], accumulation: int, observe: Observe
) -> tuple[Callable[[int], list[Any]], Callable[[bool], float | None]]:
    """Return two functions.

    The first runs one optimizer step by its index, and returns the losses of its batches.
    The second returns the loss without a gradient; its argument keeps dropout on.
    """
    if pipeline.is_pipeline(engine.module):
        return pipeline.engine_steps(engine, batches, observe)
    repeats = accumulation // len(batches)

    def train_step(index: int) -> list[Any]:
        return [optimizer_step(workload, engine, batch, repeats, index, observe) for batch in batches]

    return train_step, lambda training: evaluate(workload, engine, batches[0], training=training)


def _evaluate_seeded(seed: int, compute: Callable[[], float | None]) -> float | None:
    """Layers of experts choose tokens at random in evaluation, too: a seed makes them choose the same ones."""
    seed_all(seed)
    return compute()


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
