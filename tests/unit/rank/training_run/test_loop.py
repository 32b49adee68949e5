from __future__ import annotations

from types import SimpleNamespace

import torch

from autods.rank.training_run.loop import draw_batches
from autods.rank.training_run.samples import Share
from autods.workload import Workload

WORKLOAD = Workload(build_model=torch.nn.Identity, build_batch=lambda size: {"x": torch.zeros(size, 3)})


def draw(step, *, steps):
    """The micro batches from a step on of a run that ends after `steps`."""
    share = Share(rank=0, replicas=1, micro_batch=2, accumulation=2)
    current = SimpleNamespace(step=step, done=step >= steps, share=share)
    for index, batch in enumerate(draw_batches(WORKLOAD, current, seed=0), 1):
        yield batch
        current.step = step + index // share.accumulation
        current.done = current.step >= steps


def test_batches_are_drawn_up_to_the_end_of_the_run():
    assert [tuple(batch["x"].shape) for batch in draw(4, steps=6)] == [(2, 3)] * 4


def test_a_run_that_was_saved_at_its_end_trains_no_further():
    assert list(draw(6, steps=6)) == []
