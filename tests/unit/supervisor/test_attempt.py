"""How an attempt ended: the steps that it has done count, also where their lines came too late."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from autods.rank.job import RunOrder
from autods.supervisor.attempt import StopRequest, judge_attempt
from autods.types import Failed


@pytest.mark.parametrize(("seen", "failed_in", "done"), [(10, 15, 14), (15, 15, 15), (10, 0, 10), (10, 10, 10)])
def test_steps_before_the_one_that_failed_are_done(seen: int, failed_in: int, done: int) -> None:
    death = Failed(
        failure="infrastructure", rank=1, phase="backward", step=failed_in, evidence="killed", action="retry",
        advice="",
    )  # fmt: skip
    assert judge_attempt(death, seen_step=seen, seconds=1.0).last_step == done


def test_a_signal_ends_a_run_whose_disk_has_no_room_for_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = RunOrder(folder=str(tmp_path), attempt=1, steps=None, checkpoint_every=1)
    order.steps_file.parent.mkdir(parents=True)
    order.steps_file.touch()

    def refuse(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "touch", refuse)
    stopping = StopRequest()
    with stopping.listen(), stopping.during(order, lambda: 60.0), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert stopping.number == signal.SIGTERM


def test_the_limit_of_a_stop_holds_where_sigint_is_ignored(tmp_path: Path) -> None:
    order = RunOrder(folder=str(tmp_path), attempt=1, steps=None, checkpoint_every=1)
    order.steps_file.parent.mkdir(parents=True)
    order.steps_file.touch()
    stopping = StopRequest()

    def wait_for_the_limit() -> None:
        with stopping.listen(), stopping.during(order, lambda: 0.05):
            signal.raise_signal(signal.SIGTERM)
            time.sleep(30.0)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell without job control starts `autods run … &`
    try:
        with pytest.raises(KeyboardInterrupt):
            wait_for_the_limit()
    finally:
        signal.signal(signal.SIGINT, before)
    assert (stopping.number, order.stop_file.exists()) == (signal.SIGTERM, True)
