"""A script's steps are timed from boundary to boundary, without evaluation and saving."""

from __future__ import annotations

import pytest

from autods.trial.script.session import StepClock


def test_a_step_includes_the_wait_for_its_data():
    clock = StepClock()
    clock.begin_forward(10.0)
    clock.end_step(11.0, boundary=True)
    clock.begin_forward(13.0)  # the data took 2 s
    clock.end_step(14.0, boundary=True)
    assert clock.times == [1.0, 3.0]


def test_accumulated_micro_batches_are_one_step():
    clock = StepClock()
    for start in (0.0, 2.0, 4.0):
        clock.begin_forward(start)
        clock.end_step(start + 1.0, boundary=start == 4.0)
    assert clock.times == [5.0]


def test_an_evaluation_between_two_steps_does_not_count():
    clock = StepClock()
    clock.begin_forward(0.0)
    clock.end_step(1.0, boundary=True)
    clock.interrupt()
    clock.begin_forward(51.0)
    clock.end_step(52.0, boundary=True)
    assert clock.times == [1.0, 1.0]


def test_an_evaluation_within_an_accumulation_does_not_count():
    clock = StepClock()
    clock.begin_forward(0.0)
    clock.end_step(1.0, boundary=False)
    clock.interrupt()
    clock.begin_forward(31.0)
    clock.end_step(32.0, boundary=True)
    assert clock.times == [2.0]


def test_training_resumes_with_the_first_forward_after_a_pause():
    clock = StepClock()
    clock.begin_forward(0.0)
    clock.end_step(1.0, boundary=True)
    clock.interrupt()
    clock.begin_forward(11.0)
    clock.begin_forward(12.0)
    clock.end_step(14.0, boundary=True)
    assert clock.times == [1.0, pytest.approx(3.0)]


def test_work_of_the_trial_itself_does_not_count():
    clock = StepClock()
    clock.begin_forward(0.0)
    clock.end_step(1.0, boundary=True)
    clock.resume(101.0)
    clock.begin_forward(101.0)
    clock.end_step(102.0, boundary=True)
    assert clock.times == [1.0, 1.0]
