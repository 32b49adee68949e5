"""What the host of the simulated GPU knows to be done, from events, waits and launches alone."""

from __future__ import annotations

import pytest

from autods.forecast.simulate.stream_order import QUEUE, StreamOrder


def launch(order: StreamOrder, stream: int, count: int = 1) -> int:
    """Launch kernels on a stream; returns the mark of the last."""
    for _ in range(count):
        order.launch(stream)
    return order.launched(stream)


@pytest.fixture
def order() -> StreamOrder:
    return StreamOrder()


def test_work_is_not_done_until_the_host_waits(order: StreamOrder) -> None:
    mark = launch(order, 1)
    assert not order.is_done(1, mark)
    order.host_waits_for_stream(1)
    assert order.is_done(1, mark)


def test_waiting_for_a_stream_waits_for_what_it_waited_for(order: StreamOrder) -> None:
    mark = launch(order, 0)
    order.wait(order.record(0), 2)
    later = launch(order, 0)
    order.host_waits_for_stream(2)
    assert order.is_done(0, mark)
    assert not order.is_done(0, later)


def test_an_event_covers_only_what_came_before_it(order: StreamOrder) -> None:
    first = launch(order, 3)
    record = order.record(3)
    second = launch(order, 3)
    order.host_waits_for_record(record)
    assert (order.is_done(3, first), order.is_done(3, second)) == (True, False)


def test_a_full_queue_makes_the_host_wait(order: StreamOrder) -> None:
    mark = launch(order, 1)
    launch(order, 1, QUEUE - 1)
    assert not order.is_done(1, mark)
    launch(order, 1)
    assert order.is_done(1, mark)


def test_a_program_that_polls_an_event_comes_to_its_end(order: StreamOrder) -> None:
    launch(order, 1)
    record = order.record(1)
    assert not order.query(record)
    polls = 1
    while not order.query(record):
        polls += 1
        assert polls < 10_000
    assert order.query(record)
