"""How an attempt ended: the steps that it has done count, also where their lines came too late."""

from __future__ import annotations

import pytest

from autods.supervisor.attempt import judge_attempt
from autods.types import Failed


@pytest.mark.parametrize(("seen", "failed_in", "done"), [(10, 15, 14), (15, 15, 15), (10, 0, 10), (10, 10, 10)])
def test_steps_before_the_one_that_failed_are_done(seen: int, failed_in: int, done: int) -> None:
    death = Failed(
        failure="infrastructure", rank=1, phase="backward", step=failed_in, evidence="killed", action="retry",
        advice="",
    )  # fmt: skip
    assert judge_attempt(death, seen_step=seen, seconds=1.0).last_step == done
