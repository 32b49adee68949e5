"""Train for a few steps: build the model, initialize DeepSpeed, run and time optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..types import Exam, Phase, Steps
from ..workload.protocol import Workload, WorkloadError
from . import loss_parity, pipeline
from .batch import check_batch, longest_batch, place, seed_all
from .collectives import Traffic, backend
from .distributed import Ranks
from .exam import Hands, examine, gathering
from .model_facts import checkpoint
from .steps import Acted, has_time_for_one_more, repeat

Observe = Callable[[Phase, int], None]


def act(
    workload: Workload,
    *,
    ds_config: Mapping[str, Any],
    micro_batch: int,
    accumulation: int,
    checkpointing: bool,
    only_build: bool,
    steps: Steps,
    observe: Observe,
    synchronize: Callable[[], None],
    ranks: Ranks,
    exam: Exam | None = None,
    scratch: Path = Path(),
    seed: int = 0,
) -> Acted:
    """Train for a few optimizer steps, and pass the exam. `scratch` takes its checkpoint, `seed` makes its samples.

    A trial that measures ends with one more step, in which nothing overlaps, for the seconds of its collectives.

    What the user's code raises is passed on; WorkloadError where it breaks the contract of `Workload`.
    """
    observe("build", 0)
    model = build(workload, checkpointing=checkpointing)
    replicas = ranks
    if pipeline.is_pipeline(model):
        replicas = pipeline.replicas_of(model, ranks)
        seed_all(seed + replicas.rank)  # its stages draw the same batches
    longest = longest_batch(workload, micro_batch) if exam == "worst_case" else None
    if exam == "parity":
        batches = loss_parity.share_of(
            workload, replicas, micro_batch=micro_batch, accumulation=accumulation, seed=seed
        )
        loss_parity.check_cut(model)
        loss_parity.without_dropout(model)
        observe = listening = loss_parity.Listening(observe)
    else:
        batches = [longest.batch if longest else check_batch(workload.build_batch(micro_batch), micro_batch)]
    if only_build:
        return Acted(step_s=(), steps_s=0.0, losses=())
    observe("init", 0)
    engine = initialize(workload, model, gathering(ds_config) if longest else ds_config)
    del model
    batches = [place(batch, engine) for batch in batches]
    train, loss_of = _moves(workload, engine, batches, accumulation, observe)
    traffic = Traffic(synchronize)
    traffic.listen(backend())

    def step(index: int, *, alone: bool = False) -> list[Any]:
        with traffic.step(alone=alone):
            return train(index)

    if exam == "parity":
        loss_parity.forget_steps(engine.basic_optimizer)
        acted = repeat(step, lambda losses: loss_parity.mean_of(losses, ranks), steps, synchronize, ranks)
        loss_parity.check_steady(listening.drew, lambda: loss_of(True), ranks)
    else:
        acted = repeat(step, _last, steps, synchronize, ranks)
    if longest:
        hands = Hands(
            step=step,
            evaluate=lambda: _under_seed(seed, lambda: loss_of(False)),
            observe=observe,
            synchronize=synchronize,
        )
        index = len(acted.losses)
        examined = examine(engine, hands, ranks, longest=longest, folder=scratch / "checkpoint", index=index)
        acted = replace(acted, examined=examined)
    if exam is None and ranks.agree(traffic.can_be_timed and has_time_for_one_more(acted, steps)):
        step(len(acted.losses), alone=True)
    said = traffic.said()
    acted = replace(acted, communication=said, steps_s=acted.steps_s + (said["step_s"] or 0.0))
    observe("done", len(acted.losses))
    return acted


def _last(losses: Sequence[float]) -> float:
    return losses[-1]


def _moves(
    workload: Workload,
    engine: Any,
    batches: Sequence[Any],
    accumulation: int,
    observe: Observe,
) -> tuple[Callable[[int], list[Any]], Callable[[bool], float | None]]:
    """What an engine can do with its batches.

    One optimizer step of that index → the losses of its batches; whether dropout acts → the loss without a gradient.
    """
    if pipeline.is_pipeline(engine.module):
        return pipeline.moves(engine, batches, observe)
    each = accumulation // len(batches)

    def train(index: int) -> list[Any]:
        return [optimizer_step(workload, engine, batch, each, index, observe) for batch in batches]

    return train, lambda training: evaluate(workload, engine, batches[0], training=training)


def build(workload: Workload, *, checkpointing: bool) -> Any:
    """The workload's model, told to recompute its activations if so asked."""
    model = workload.build_model()
    if checkpointing:
        checkpoint(model)
    return model


def initialize(workload: Workload, model: Any, ds_config: Mapping[str, Any]) -> Any:
    """DeepSpeed's engine around the model, with the workload's optimizer if it brings one."""
    import deepspeed

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = workload.build_optimizer(parameters) if workload.build_optimizer else None
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameters, optimizer=optimizer, config=dict(ds_config)
    )
    return engine


def _under_seed(seed: int, forward: Callable[[], float | None]) -> float | None:
    """Layers of experts choose tokens at random in evaluation, too: the same ones each time."""
    seed_all(seed)
    return forward()


def optimizer_step(workload: Workload, engine: Any, batch: Any, accumulation: int, index: int, observe: Observe) -> Any:
    """One optimizer step on a batch that lies on the engine's device: the loss of its last micro batch."""
    for _ in range(accumulation):
        observe("forward", index)
        loss = _loss(workload, engine, batch)
        observe("backward", index)
        engine.backward(loss)
        observe("step", index)
        engine.step()
    return loss


def evaluate(workload: Workload, engine: Any, batch: Any, *, training: bool = False) -> float | None:
    """The loss without a gradient, the engine back in training; None where the model returns none in evaluation."""
    import torch

    engine.train(training)
    with torch.no_grad():
        loss = _output(workload, engine, batch)
    engine.train()
    return float(loss) if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


def _output(workload: Workload, engine: Any, batch: Any) -> Any:
    """What should be a loss."""
    if workload.loss is not None:
        return workload.loss(engine, batch)
    out = engine(**batch) if isinstance(batch, Mapping) else engine(*batch)
    return out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", out)


def _loss(workload: Workload, engine: Any, batch: Any) -> Any:
    import torch

    loss = _output(workload, engine, batch)
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
