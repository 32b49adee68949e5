"""Support for `deepspeed.pipe.PipelineModule`: layers cut into stages, whose engine runs whole optimizer steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ..types import Phase
from ..workload.protocol import WorkloadError
from .distributed import Ranks
from .patching import declare

_PIPELINE_INIT = declare(
    "deepspeed.pipe.PipelineModule.__init__", "a look at the model needs all its layers without its ranks"
)


def is_pipeline(model: Any) -> bool:
    """Whether the model is a PipelineModule; DeepSpeed need not be imported for it."""
    return any(cls.__name__ == "PipelineModule" for cls in type(model).__mro__)


def data_parallel_ranks(model: Any) -> Ranks:
    """Return the place of this rank among those that hold the same stage, to draw batches by.

    All stages of one replica train on the same batch.
    """
    grid = model.mpu()
    return Ranks(grid.get_data_parallel_rank(), grid.get_data_parallel_world_size())


class PipelineSteps:
    """The steps of a pipeline's engine. They take the batches in turn, as many as a step accumulates.

    Raises WorkloadError if a batch is no pair.
    """

    def __init__(self, engine: Any, batches: Sequence[Any], observe: Callable[[Phase, int], None]) -> None:
        for batch in batches:
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                kind = f"{len(batch)} things" if isinstance(batch, tuple | list) else type(batch).__name__
                raise WorkloadError(
                    f"build_batch returned {kind}, and a PipelineModule takes two: inputs and labels",
                    hint="return (inputs, labels); each may be a tensor or a tuple of tensors",
                )
        self._engine, self._batches, self._observe = engine, batches, observe
        self._index: int | None = None  # of the step that runs
        # Micro batches alternate in a pipeline: everything between two forward passes is reported as backward.
        engine.module.register_forward_pre_hook(lambda *_: self._report("forward"))
        engine.module.register_forward_hook(lambda *_: self._report("backward"))
        engine.basic_optimizer.register_step_pre_hook(lambda *_: self._report("step"))

    def _report(self, phase: Phase) -> None:
        if self._index is not None:
            self._observe(phase, self._index)

    def train(self, index: int) -> Sequence[Any]:
        """Run the optimizer step with this index; return its loss."""
        self._index = index
        loss = self._engine.train_batch(itertools.cycle(self._batches))
        self._index = None
        return [loss]

    def compute_loss(self, *, keep_dropout: bool) -> float:
        """Return the mean loss of a step's micro batches without a gradient."""
        engine = self._engine
        if keep_dropout:
            engine.module.eval = engine.module.train  # eval_batch calls it first
        loss = engine.eval_batch(itertools.cycle(self._batches))
        vars(engine.module).pop("eval", None)
        engine.train()
        return float(loss)


def build_whole(build_model: Callable[[], Any]) -> Any:
    """Build the model; a PipelineModule gets all its layers. What the user's code raises is passed on."""
    with _PIPELINE_INIT.installed(_init_with_all_layers):
        return build_model()


def build_all_layers() -> None:
    """From here on a PipelineModule in this process has all its layers; by itself it needs all its ranks, and holds
    one stage."""
    _PIPELINE_INIT.install(_init_with_all_layers)


def pipeline_facts(model: Any) -> dict[str, int]:
    """Return the fields of `ModelFacts` for pipelines; a pipeline must have been built with all its layers."""
    if not is_pipeline(model):
        return {"pipeline_stages": 0, "replica_ranks": 1}
    return {"pipeline_stages": model.num_stages, "replica_ranks": getattr(model, "replica_ranks", model.num_stages)}


def _init_with_all_layers(
    self: Any, layers: Any, num_stages: int | None = None, topology: Any = None, **_: Any
) -> None:
    import torch
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    torch.nn.Module.__init__(self)
    if topology is not None:
        self.num_stages = topology.get_dim("pipe")
        self.replica_ranks = topology.world_size() // max(1, topology.get_dim("data"))
    elif num_stages is not None:
        self.num_stages = self.replica_ranks = num_stages
    else:
        raise WorkloadError("the PipelineModule has neither num_stages nor a topology", hint="give num_stages=2, say")
    tied: set[str] = set()  # tied layers count once
    for place, layer in enumerate(layers):
        if isinstance(layer, TiedLayerSpec):
            if layer.key in tied:
                continue
            tied.add(layer.key)
        built = layer.build() if isinstance(layer, LayerSpec) else layer
        if isinstance(built, torch.nn.Module):
            self.add_module(str(place), built)
