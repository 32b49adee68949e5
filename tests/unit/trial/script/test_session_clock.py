"""A script's steps are timed from boundary to boundary, and what is no training does not count."""

from __future__ import annotations

import pytest

from autods.trial.script.session import Clock


def test_a_step_includes_the_wait_for_its_data():
    clock = Clock()
    clock.forward(10.0)
    clock.step(11.0, boundary=True)
    clock.forward(13.0)  # the data took 2 s
    clock.step(14.0, boundary=True)
    assert clock.times == [1.0, 3.0]


def test_accumulated_micro_batches_are_one_step():
    clock = Clock()
    for start in (0.0, 2.0, 4.0):
        clock.forward(start)
        clock.step(start + 1.0, boundary=start == 4.0)
    assert clock.times == [5.0]


def test_an_evaluation_between_two_steps_does_not_count():
    clock = Clock()
    clock.forward(0.0)
    clock.step(1.0, boundary=True)
    clock.other()
    clock.forward(51.0)
    clock.step(52.0, boundary=True)
    assert clock.times == [1.0, 1.0]


def test_an_evaluation_within_an_accumulation_does_not_count():
    clock = Clock()
    clock.forward(0.0)
    clock.step(1.0, boundary=False)
    clock.other()
    clock.forward(31.0)
    clock.step(32.0, boundary=True)
    assert clock.times == [2.0]


def test_the_second_training_forward_of_a_step_does_not_hide_the_first():
    clock = Clock()
    clock.forward(0.0)
    clock.step(1.0, boundary=True)
    clock.other()
    clock.forward(11.0)
    clock.forward(12.0)
    clock.step(14.0, boundary=True)
    assert clock.times == [1.0, pytest.approx(3.0)]


def test_what_the_trial_itself_did_is_left_out():
    clock = Clock()
    clock.forward(0.0)
    clock.step(1.0, boundary=True)
    clock.resume(101.0)
    clock.forward(101.0)
    clock.step(102.0, boundary=True)
    assert clock.times == [1.0, 1.0]
    assert clock.total_s == 2.0
