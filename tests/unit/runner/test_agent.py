"""What a zygote does with the words of its agent."""

from __future__ import annotations

import socket

import pytest

from autods.runner import zygote as zygotes


def test_the_word_that_ends_a_job_is_heard_though_it_comes_with_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool]] = []
    monkeypatch.setattr(zygotes, "_run", lambda line, *about: seen.append((line, about[-1])))
    ours, its = socket.socketpair()
    with ours, its:
        ours.sendall(b"abort\none\nabort\nabort\n")
        ours.shutdown(socket.SHUT_WR)
        zygotes._serve(its, None, None, spawn=False)
        assert seen == [("one", True)]
