"""What a zygote does with the lines of its agent."""

from __future__ import annotations

import socket

import pytest

from autods.runner.protocol import NodeReport, StoreBound, StoreFailed, decode
from autods.runner.zygote import Zygote
from tests.support.ends import JOB, report_of


def served(lines: bytes) -> list[bytes]:
    """What a zygote answers to these lines."""
    ours, peer = socket.socketpair()
    with ours, peer:
        ours.sendall(lines)
        ours.shutdown(socket.SHUT_WR)
        Zygote(peer, None, None, spawn=False).serve()
        peer.shutdown(socket.SHUT_WR)
        return ours.makefile("rb").read().splitlines()


def test_an_abort_that_comes_with_its_job_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[tuple[str, bool]] = []

    def run_job(zygote: Zygote, job: object, *, aborted: bool) -> NodeReport:
        jobs.append((getattr(job, "folder", ""), aborted))
        return report_of()

    monkeypatch.setattr(Zygote, "run_job", run_job)
    job = JOB.to_json().encode()
    (answer,) = served(b"abort\n" + job + b"\nabort\nabort\n")
    assert jobs == [(JOB.folder, True)]
    assert decode(answer) == report_of()


def test_a_store_is_bound_where_the_address_is_this_machines() -> None:
    bound, failed = map(decode, served(b"bind 127.0.0.1\nbind 192.0.2.1\n"))
    assert isinstance(bound, StoreBound)
    assert isinstance(failed, StoreFailed)
    assert "192.0.2.1" in failed.reason
