"""How many optimizer steps a trial runs before it is examined."""

from __future__ import annotations

import math

import pytest
import torch

from autods.trial.distributed import Ranks
from autods.trial.steps import Acted, repeat
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
