"""The connection between driver and nodes: each sees the other's end, and a stranger is no node."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from autods.runner import lifeline
from autods.runner.lifeline import Lifelines, hold


@pytest.fixture
def lines() -> Iterator[Lifelines]:
    lines = Lifelines("127.0.0.1")
    yield lines
    lines.close()


def test_while_both_live_nothing_has_ended(lines: Lifelines) -> None:
    assert hold(lines.open(), 0, lambda: None)
    assert lines.admit(1) == []
    assert lines.ended() == {}


def test_a_node_learns_that_the_driver_is_gone(lines: Lifelines) -> None:
    gone = threading.Event()
    hold(lines.open(), 0, gone.set)
    lines.admit(1)
    lines.close()
    assert gone.wait(10)


def test_the_driver_learns_which_node_is_gone(lines: Lifelines) -> None:
    place = lines.open()
    hold(place, 0, lambda: None)
    other = said_by(place, token=place["token"], node=1)
    assert lines.admit(2) == []
    other.close()
    began = time.monotonic()
    while not lines.ended() and time.monotonic() - began < 20:  # a busy kernel brings the news a moment later
        time.sleep(0.001)
    assert lines.ended() == {1: "its actor's process ended"}


@pytest.mark.parametrize("words", [{"token": "guessed", "node": 0}, {"node": 0}, "hello"])
def test_a_stranger_is_no_node(lines: Lifelines, monkeypatch: pytest.MonkeyPatch, words: object) -> None:
    monkeypatch.setattr(lifeline, "_CONNECTS_S", 0.2)
    place = lines.open()
    stranger = socket.create_connection((place["address"], place["port"]))
    stranger.sendall(json.dumps(words).encode())
    assert lines.admit(1) == [0]
    stranger.close()


def test_who_says_nothing_keeps_no_node_out(lines: Lifelines) -> None:
    place = lines.open()
    with socket.create_connection((place["address"], place["port"])):
        hold(place, 0, lambda: None)
        assert lines.admit(1) == []


def test_a_node_that_cannot_reach_the_driver_says_so(lines: Lifelines) -> None:
    place = lines.open()
    assert lines._door is not None
    lines._door.close()
    assert not hold(place, 0, lambda: None)


def said_by(place: dict[str, object], **words: object) -> socket.socket:
    caller = socket.create_connection((place["address"], place["port"]))  # type: ignore[arg-type]
    caller.sendall(json.dumps(words).encode())
    return caller
