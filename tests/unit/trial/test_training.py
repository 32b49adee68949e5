"""How many optimizer steps a trial runs."""

from __future__ import annotations

import pytest
import torch

from autods.trial.distributed import Ranks
from autods.trial.training import run_steps
from autods.types import Steps

ALONE = Ranks(rank=0, world_size=1)


@pytest.mark.parametrize(("warmup", "timed"), [(0, 1), (1, 3), (3, 2)])
def test_a_trial_runs_its_warm_up_and_then_its_timed_steps(warmup: int, timed: int) -> None:
    steps = Steps(warmup=warmup, timed=timed, most_timed=timed)
    result = run_steps(lambda index: [torch.tensor(float(index))], steps, lambda: None, ALONE)
    assert (len(result.losses), len(result.step_s)) == (warmup + timed, timed)


@pytest.mark.parametrize(("spread", "timed"), [(1e9, 2), (0.0, 5)])
def test_timed_steps_end_early_once_their_spread_is_small(spread: float, timed: int) -> None:
    steps = Steps(warmup=0, timed=2, most_timed=5, spread=spread, budget_s=60.0)
    result = run_steps(lambda index: [torch.tensor(1.0)], steps, lambda: None, ALONE)
    assert len(result.step_s) == timed


def test_the_loss_of_a_step_is_the_mean_of_its_micro_batches() -> None:
    losses = [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(6.0)]
    assert run_steps(lambda index: losses, Steps(warmup=0), lambda: None, ALONE).losses == (3.0,)
