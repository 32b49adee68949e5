"""A `deepspeed.pipe.PipelineModule`: layers cut into stages, whose engine runs whole optimizer steps by itself."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..types import Phase
from ..workload.protocol import WorkloadError
from .distributed import Ranks


def is_pipeline(model: Any) -> bool:
    """Whether the model is one; False where DeepSpeed's pipelines were not even imported."""
    return any(cls.__name__ == "PipelineModule" for cls in type(model).__mro__)


def replicas_of(model: Any, ranks: Ranks) -> Ranks:
    """The ranks as those see them that hold the same stage: all stages of one replica train on the same batch."""
    grid = model.mpu()
    return replace(ranks, rank=grid.get_data_parallel_rank(), world_size=grid.get_data_parallel_world_size())


def check_pair(batch: Any) -> Any:
    """The batch itself. Raises WorkloadError when it is not what the first stage and the loss take."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        said = f"{len(batch)} things" if isinstance(batch, tuple | list) else type(batch).__name__
        raise WorkloadError(
            f"build_batch returned {said}, and a PipelineModule takes two: inputs and labels",
            hint="return (inputs, labels); each may be a tensor or a tuple of tensors",
        )
    return batch


def moves(
    engine: Any, batches: Sequence[Any], observe: Callable[[Phase, int], None]
) -> tuple[Callable[[int], list[Any]], Callable[[bool], float]]:
    """As those of `act`: one optimizer step, and the mean loss of its micro batches without a gradient.

    Both take the batches in turn, as many as a step accumulates. WorkloadError where a batch is no pair.
    """
    for batch in batches:
        check_pair(batch)
    telling = _tell_phases(engine, observe)

    def train(index: int) -> list[Any]:
        with telling(index):
            return [engine.train_batch(itertools.cycle(batches))]

    def loss_of(training: bool) -> float:
        with _kept_training(engine.module) if training else contextlib.nullcontext():
            loss = engine.eval_batch(itertools.cycle(batches))
        engine.train()
        return float(loss)

    return train, loss_of


def _tell_phases(
    engine: Any, observe: Callable[[Phase, int], None]
) -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """Have a stage tell what it does while the block of a step's index lasts.

    Passes of several micro batches alternate: what comes between a forward pass and the next is backward.
    """
    steps: list[int] = []  # of the step that runs, if one does

    def tell(phase: Phase) -> None:
        for index in steps:
            observe(phase, index)

    @contextlib.contextmanager
    def telling(index: int) -> Iterator[None]:
        steps.append(index)
        yield
        steps.clear()

    engine.module.register_forward_pre_hook(lambda *_: tell("forward"))
    engine.module.register_forward_hook(lambda *_: tell("backward"))
    engine.basic_optimizer.register_step_pre_hook(lambda *_: tell("step"))
    return telling


@contextlib.contextmanager
def _kept_training(module: Any) -> Iterator[None]:
    module.eval = module.train  # what eval_batch calls first
    try:
        yield
    finally:
        del module.eval


def whole(build_model: Callable[[], Any]) -> Any:
    """The model; a PipelineModule with all its layers, see `lay_out`. What the user's code raises is passed on."""
    from deepspeed.pipe import PipelineModule

    own = PipelineModule.__init__
    lay_out()
    try:
        return build_model()
    finally:
        PipelineModule.__init__ = own


def lay_out() -> None:
    """From here on a PipelineModule is made of all its layers, for who only looks: one itself needs all its ranks, and
    holds one stage. `parts_of` reads its stages."""
    from deepspeed.pipe import PipelineModule

    PipelineModule.__init__ = _lay_out


def parts_of(model: Any) -> dict[str, int]:
    """Those of `ModelFacts` that a pipeline decides, of a model that was laid out."""
    if not is_pipeline(model):
        return {"pipeline_stages": 0, "replica_ranks": 1}
    return {"pipeline_stages": model.num_stages, "replica_ranks": getattr(model, "replica_ranks", model.num_stages)}


def _lay_out(self: Any, layers: Any, num_stages: int | None = None, topology: Any = None, **_: Any) -> None:
    import torch

    torch.nn.Module.__init__(self)
    if topology is not None:
        self.num_stages = topology.get_dim("pipe")
        self.replica_ranks = topology.world_size() // max(1, topology.get_dim("data"))
    elif num_stages is not None:
        self.num_stages = self.replica_ranks = num_stages
    else:
        raise WorkloadError("the PipelineModule has neither num_stages nor a topology", hint="give num_stages=2, say")
    for place, layer in enumerate(_each_once(layers)):
        self.add_module(str(place), layer)


def _each_once(layers: Any) -> Iterator[Any]:
    """Those that are modules; what is tied is one."""
    import torch
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    tied: set[str] = set()
    for layer in layers:
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in tied:
                tied.add(layer.key)
                yield layer.build()
        elif isinstance(layer, LayerSpec):
            yield layer.build()
        elif isinstance(layer, torch.nn.Module):
            yield layer
