"""Train a workload for a few optimizer steps: build the model, initialize DeepSpeed, run and time the steps.

The simulated GPU runs the same `build`, `initialize` and `optimizer_step`, so that a forecast and a trial differ in the
device alone.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..types import Examined, Phase, Steps
from ..workload.protocol import Workload, WorkloadError
from . import loss_parity, pipeline
from .distributed import Ranks, Traffic
from .exam import WorstCaseExam, allow_gathering
from .job import RankJob
from .memory import Meter
from .model_facts import check_batch, enable_checkpointing, largest_shape, longest_batch, place, seed_all
from .result import RankResult
from .step_recorder import StepRecorder, was_skipped
from .weights import drawing_in_parallel

Observe = Callable[[Phase, int], None]


def train(workload: Workload, job: RankJob, *, observe: Observe, meter: Meter, ranks: Ranks) -> RankResult:
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
        return RankResult()

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

    recorder = run_steps(step, job.steps, meter, ranks, lambda: was_skipped(engine))
    index = len(recorder.losses)
    result = RankResult(
        step_s=recorder.timed,
        steps_s=recorder.steps_s,
        losses=tuple(recorder.losses),
        skipped_steps=recorder.skipped,
    )
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
                held_bytes=recorder.held_bytes,
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
    steps_s = result.steps_s + (communication.step_s or 0.0)
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
) -> StepRecorder:
    """Run warm-up steps, and timed steps until their spread is small or their number or time is spent.

    `step` returns the losses of a step's batches. `skipped` tells whether the optimizer did not run in it.
    Raises WorkloadError as `StepRecorder.record`.
    """
    recorder = StepRecorder(steps)
    while not recorder.has_enough(ranks):
        meter.synchronize()
        began = time.perf_counter()
        losses = step(len(recorder.losses))
        meter.synchronize()
        seconds = time.perf_counter() - began
        recorder.record(seconds, [loss.detach() for loss in losses], meter.held_bytes(), skipped=skipped())
    return recorder


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
