"""A `deepspeed.pipe.PipelineModule`: layers cut into stages, whose engine runs whole optimizer steps by itself."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..values import Phase
from ..workload import WorkloadError
from .rendezvous import Ranks


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
            mend="return (inputs, labels); each may be a tensor or a tuple of tensors",
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


class _Laid(Exception):  # it is no error: the layers are known, and nothing more is wanted
    def __init__(self, layers: Sequence[Any], stages: int, ranks: int) -> None:
        super().__init__("a PipelineModule")
        self.layers, self.stages, self.ranks = layers, stages, ranks


def whole(build_model: Callable[[], Any]) -> Any:
    """The model; of a PipelineModule all layers in one module, with `pipeline_stages` and `replica_ranks` beside them.

    A PipelineModule itself needs all its ranks, and holds one stage only. What the user's code raises is passed on.
    """
    from deepspeed.pipe import PipelineModule

    own = PipelineModule.__init__
    PipelineModule.__init__ = _lay
    try:
        return build_model()
    except _Laid as laid:
        return _joined(laid)
    finally:
        PipelineModule.__init__ = own


def hold_all_layers() -> None:
    """From here on a PipelineModule of this process is all of its layers, as of `whole`: for a look with one rank."""
    import torch
    from deepspeed.pipe import PipelineModule

    def hold(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            _lay(self, *args, **kwargs)
        except _Laid as laid:
            torch.nn.Module.__init__(self)
            self.held = _joined(laid)
            self.pipeline_stages, self.replica_ranks = laid.stages, laid.ranks

    PipelineModule.__init__ = hold


def _lay(self: Any, layers: Any, num_stages: int | None = None, topology: Any = None, **_: Any) -> None:
    if topology is not None:
        ranks = {axis: topology.get_dim(axis) for axis in topology.get_axis_names()}
        data = ranks.pop("data", 1)
        raise _Laid(list(layers), ranks["pipe"], topology.world_size() // data)
    if num_stages is None:
        raise WorkloadError("the PipelineModule has neither num_stages nor a topology", mend="give num_stages=2, say")
    raise _Laid(list(layers), num_stages, num_stages)


def _joined(laid: _Laid) -> Any:
    """Each layer once; what is tied is one."""
    import torch
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    tied: dict[str, Any] = {}
    found = torch.nn.ModuleList()
    for layer in laid.layers:
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in tied:
                tied[layer.key] = layer.build()
                found.append(tied[layer.key])
        elif isinstance(layer, LayerSpec):
            found.append(layer.build())
        elif isinstance(layer, torch.nn.Module):
            found.append(layer)
    facts: Any = found
    facts.pipeline_stages, facts.replica_ranks = laid.stages, laid.ranks
    return found
