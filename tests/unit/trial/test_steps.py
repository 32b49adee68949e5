"""How many optimizer steps a trial runs before it is examined."""

from __future__ import annotations

import math

import pytest
import torch

from autods.trial.distributed import Ranks
from autods.trial.steps import PROVING_STEPS, Acted, repeat
from autods.types import Steps

ALONE = Ranks(rank=0, world_size=1, agree=lambda word: word, mean=float, wait=lambda: None)


def ran(steps: Steps, last_from_s: float | None) -> Acted:
    return repeat(
        lambda index: [torch.tensor(float(index))],
        lambda losses: losses[-1],
        steps,
        lambda: None,
        ALONE,
        last_from_s=last_from_s,
    )


@pytest.mark.parametrize(
    ("last_from_s", "losses", "timed"), [(None, 4, 3), (math.inf, 4, 3), (1e-9, 2, 1), (0.0, 1, 0)]
)
def test_a_timed_step_that_is_long_enough_is_the_last_before_the_exam(
    last_from_s: float | None, losses: int, timed: int
) -> None:
    acted = ran(Steps(warmup=1, timed=3, most_timed=3), last_from_s)
    assert (len(acted.losses), len(acted.step_s)) == (losses, timed)


def test_a_step_that_warms_up_ends_nothing_however_long_it_is() -> None:
    assert len(ran(Steps(warmup=3, timed=2, most_timed=2), 1e-9).losses) == 4


@pytest.mark.parametrize(
    ("last_from_s", "shown_of", "losses"),
    [(1e-9, 0.75, PROVING_STEPS), (0.0, 0.75, PROVING_STEPS), (1e-9, None, PROVING_STEPS + 2), (99.0, 0.75, 5)],
)
def test_steps_that_prove_tell_that_the_exam_follows_where_they_are_long_enough(
    last_from_s: float, shown_of: float | None, losses: int
) -> None:
    eased: list[int] = []
    acted = repeat(
        lambda index: [torch.tensor(float(index))],
        lambda losses: losses[-1],
        Steps(warmup=1, timed=2, most_timed=2),
        lambda: None,
        ALONE,
        proven=lambda: eased.append(1),
        last_from_s=last_from_s,
        shown_of=shown_of,
    )
    assert len(acted.losses) == losses
    assert bool(eased) is (losses > PROVING_STEPS)
    assert bool(acted.step_s) is (losses > PROVING_STEPS)


@pytest.mark.parametrize("warmup", [0, 1, 2, 5])
def test_steps_that_prove_come_before_the_timed_ones_and_one_warms_up_between(warmup: int) -> None:
    order: list[str] = []

    def step(index: int) -> list[torch.Tensor]:
        order.append("step")
        return [torch.tensor(0.0)]

    acted = repeat(
        step,
        lambda losses: losses[-1],
        Steps(warmup=warmup, timed=2, most_timed=2),
        lambda: None,
        ALONE,
        proven=lambda: order.append("proven"),
    )
    assert order.index("proven") == PROVING_STEPS
    assert len(acted.step_s) == 2
    assert len(acted.losses) == max(warmup, PROVING_STEPS + 1) + 2
