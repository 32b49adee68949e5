"""The training of a `model.py` or a Hugging Face config in a run: its data, and its optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...types import Phase
from ...workload.protocol import Workload, WorkloadError
from ..job import RankJob
from ..model_facts import check_batch, place, seed_all
from ..training import build, initialize, optimizer_step
from .order import RunOrder
from .samples import derive_seed
from .session import Session, session

Observe = Callable[[Phase, int], None]


def train(workload: Workload, job: RankJob, order: RunOrder, observe: Observe) -> None:
    """Train a workload until the order's steps are done, on every rank. Exceptions of the user's code are passed on."""
    if order.steps is None:
        raise WorkloadError("a run of a model.py or a config needs a number of steps", hint="give --steps")
    observe("build", 0)
    model = build(workload, checkpointing=job.checkpointing)
    observe("init", 0)
    engine = initialize(workload, model, order.ds_config)
    del model
    current = session(engine)
    for batch in draw_batches(workload, current, order):
        loss = optimizer_step(workload, engine, place(batch, engine), 1, current.step, observe)
        current.step_done(loss)


def draw_batches(workload: Workload, current: Session, order: RunOrder) -> Iterator[Any]:
    """Yield this rank's micro batches of `build_batch`, each sample drawn with a seed of its own."""
    while not current.done:
        for first, last in current.share.spans(current.step):
            yield _join([_draw(workload, order.seed, sample) for sample in range(first, last)])


def _draw(workload: Workload, seed: int, sample: int) -> Any:
    seed_all(derive_seed(seed, sample))
    return check_batch(workload.build_batch(1), 1)


def _join(samples: list[Any]) -> Any:
    import torch

    first = samples[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(samples)
    if isinstance(first, Mapping):
        return {key: _join([sample[key] for sample in samples]) for key in first}
    return type(first)(_join(list(items)) for items in zip(*samples, strict=True))
