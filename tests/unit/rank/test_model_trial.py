"""How many optimizer steps a trial runs, and which of them count."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
import torch

from autods.rank.distributed import Ranks
from autods.rank.memory import Meter
from autods.rank.model_trial import run_steps
from autods.rank.step_recorder import StepRecorder
from autods.types import Steps
from autods.workload import WorkloadError

ALONE = Ranks(rank=0, world_size=1)


def record(
    step: Callable[[int], list[torch.Tensor]], steps: Steps, skipped: Callable[[], bool] = lambda: False
) -> StepRecorder:
    recorder = StepRecorder(steps)
    run_steps(step, recorder, Meter(), ALONE, skipped)
    return recorder


@pytest.mark.parametrize(("warmup", "timed"), [(0, 1), (1, 3), (3, 2)])
def test_a_trial_runs_its_warm_up_and_then_its_timed_steps(warmup: int, timed: int) -> None:
    steps = Steps(warmup=warmup, timed=timed, most_timed=timed)
    result = record(lambda index: [torch.tensor(float(index))], steps)
    assert (len(result.losses), len(result.timed)) == (warmup + timed, timed)


@pytest.mark.parametrize(("spread", "timed"), [(1e9, 2), (0.0, 5)])
def test_timed_steps_end_early_once_their_spread_is_small(spread: float, timed: int) -> None:
    steps = Steps(warmup=0, timed=2, most_timed=5, spread=spread, budget_s=60.0)
    result = record(lambda index: [torch.tensor(1.0)], steps)
    assert len(result.timed) == timed


def test_the_loss_of_a_step_is_the_mean_of_its_micro_batches() -> None:
    losses = [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(6.0)]
    assert record(lambda index: losses, Steps(warmup=0)).losses == [3.0]


def test_skipped_steps_are_neither_timed_nor_warm_up() -> None:
    """A loss scale that comes down in two steps; a full step takes 20 ms longer than one without the optimizer."""
    overflows = iter([True, True, False, False, True, False])
    skipped: list[bool] = []

    def step(index: int) -> list[torch.Tensor]:
        skipped.append(next(overflows))
        time.sleep(0.0 if skipped[-1] else 0.02)
        return [torch.tensor(float(len(skipped)))]

    result = record(step, Steps(warmup=1, timed=2, most_timed=2), lambda: skipped[-1])
    assert (len(result.timed), min(result.timed) > 0.02) == (2, True)
    assert (result.losses, result.skipped) == ([3.0, 4.0, 6.0], 3)


def test_a_loss_scale_that_never_comes_to_rest_is_an_error() -> None:
    with pytest.raises(WorkloadError, match="41 optimizer steps in a row were skipped") as error:
        record(lambda index: [torch.tensor(1.0)], Steps(), lambda: True)
    assert "fp16.initial_scale_power" in str(error.value.hint)


def test_the_loss_of_a_skipped_step_may_be_infinite() -> None:
    """An fp16 forward that overflows has an infinite loss and gradient, so DeepSpeed skips the step."""
    losses = iter([math.inf, 2.0])
    current: list[float] = []

    def step(index: int) -> list[torch.Tensor]:
        current.append(next(losses))
        return [torch.tensor(current[-1])]

    result = record(step, Steps(warmup=0), lambda: math.isinf(current[-1]))
    assert (result.losses, result.skipped) == ([2.0], 1)


def test_the_loss_of_a_model_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(WorkloadError, match="the loss is nan at step 1"):
        record(lambda index: [torch.tensor(math.nan)], Steps(warmup=0))


def test_skipped_steps_without_a_finite_loss_are_an_error() -> None:
    """In fp16 a loss of NaN overflows the gradients as well, and a smaller loss scale does not mend it."""
    with pytest.raises(WorkloadError, match="the loss is nan at step 1"):
        record(lambda index: [torch.tensor(math.nan)], Steps(warmup=0), lambda: True)
