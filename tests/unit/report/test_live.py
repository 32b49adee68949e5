"""What is printed while a command works, where nothing can be redrawn."""

from __future__ import annotations

import io
import sys
import time

import pytest
from rich.console import Console

from autods.events import Note, SearchStarted, Stage, StageStarted, TrialFinished
from autods.report import live
from autods.report.live import CheckProgress, TrialProgress
from tests.support.reports import LADDER, LIMIT, fit, record
from tests.support.screen import run_on_terminal


def wait_for_lines(read: object, count: int) -> list[str]:
    until = time.monotonic() + 9
    while len(lines := read().splitlines()) < count:  # type: ignore[operator]
        assert time.monotonic() < until, lines
        time.sleep(0.02)
    return lines


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_QUIET_S", "_QUIET_AGAIN_S", "_LOOK_EVERY_S"):
        monkeypatch.setattr(live, name, 0.05)


def test_what_goes_on_is_said_again_where_nothing_else_is() -> None:
    console = Console(file=io.StringIO(), width=100)
    with TrialProgress(console) as progress:
        progress(Note(text="starting Ray"))
        progress(Note(text="process 7 was stopped", passing=True))
        lines = wait_for_lines(console.file.getvalue, 4)  # type: ignore[attr-defined]
    assert lines[:2] == ["starting Ray", "process 7 was stopped"]
    assert all(line.startswith("… starting Ray ") for line in lines[2:])


def test_a_long_check_of_the_request_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    printed: list[str] = []

    def read() -> str:
        printed.append(capsys.readouterr().err)
        return "".join(printed)

    with CheckProgress("checking the workload"):
        lines = wait_for_lines(read, 1)
    assert lines[0].startswith("… checking the workload ")


def test_stage_and_time_left_are_said_where_nothing_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_PROGRESS_EVERY_S", 0.0)
    monkeypatch.setattr(live, "_LOOK_EVERY_S", 9.0)
    console = Console(file=io.StringIO(), width=100)
    stages = (Stage(name="race", trials=3), Stage(name="certify", trials=1))
    with TrialProgress(console) as progress:
        progress(SearchStarted(ladder=LADDER, device_bytes=LIMIT, usable_bytes=LIMIT))
        progress(StageStarted(stages=stages, place=0))
        progress(TrialFinished(record=record(1, "zero2", fit(300), purpose="grow")))  # of 2.9 s
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0] == "race, 1 of 2"
    assert lines[2] == "race, 1 of 2: 1 of about 4 trials done, about 10 s left"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_trial_that_left_no_headroom_is_no_fit(terminal: bool) -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=terminal)
    with TrialProgress(console) as progress:
        progress(SearchStarted(ladder=LADDER, device_bytes=LIMIT, usable_bytes=0.95 * LIMIT))
        progress(TrialFinished(record=record(1, "zero2", fit(410))))
        progress(TrialFinished(record=record(2, "zero2", fit(300))))
    lines = [line for line in console.file.getvalue().splitlines() if "trial " in line]  # type: ignore[attr-defined]
    assert ["no headroom: 410.0" in line for line in lines] == [True, False]
    assert ["fits: 300.0" in line for line in lines] == [False, True]


FIT_THAT_GOES_ON = """
import time
from autods.events import SearchStarted, TrialFinished, TrialStarted
from autods.report.live import TrialProgress
from autods.types import Knobs, Trial
from tests.support.reports import LADDER, LIMIT, fit, record

with TrialProgress() as progress:
    progress(SearchStarted(ladder=LADDER, device_bytes=LIMIT, usable_bytes=0.95 * LIMIT))
    progress(TrialFinished(record=record(1, "zero2", fit(300))))
    progress(TrialStarted(id=2, trial=Trial(rung="zero2", knobs=Knobs(), purpose="grow")))
    time.sleep(2)
    for number in range(3, 60):
        progress(TrialFinished(record=record(number, "zero3", fit(200))))
        time.sleep(0.4)
"""


def test_a_terminal_made_narrower_keeps_no_ghost() -> None:
    command = [sys.executable, "-c", FIT_THAT_GOES_ON]
    wide, narrow = run_on_terminal(command, widths=[120, 60], until=["zero2  grow", "trial 5"])
    assert "zero3-nvme" in "\n".join(wide)
    text = "\n".join(narrow)
    assert "zero3-nvme" not in text  # there is no room for the rungs now
    assert "──" not in text
    assert [text.count(f"trial {number}: ") for number in (1, 3, 4, 5)] == [1, 1, 1, 1]
