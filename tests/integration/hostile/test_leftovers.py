"""A fault leaves nothing after 10 s: no process, no file in /tmp or /dev/shm, no socket.

tests/benchmarks/leftovers.py has all faults. Those here run side by side, each in namespaces of its own.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.support.leftovers import AFTER_S, finish, start, why_not

ROWS = (
    "fit: driver and zygote -9",
    "fit: a normal end after pools and shared memory",
    "plan: simulators stopped, driver -9",
)


@pytest.fixture(scope="module")
def started() -> Iterator[dict[str, subprocess.Popen[str]]]:
    if reason := why_not():
        pytest.skip(reason)
    cases = {name: start(name) for name in ROWS}
    yield cases
    for case in cases.values():
        case.kill()
        case.wait()


@pytest.mark.parametrize("name", ROWS)
def test_nothing_is_left_after_ten_seconds(started: dict[str, subprocess.Popen[str]], name: str) -> None:
    row = finish(name, started[name])
    assert not row.problem, (row.problem, row.said)
    assert {kind: items for kind, items in row.left[AFTER_S[-1]].items() if items} == {}
