"""What ranks print is passed on line by line, once, and whatever they print."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from autods.events import TrialFinished, TrialStarted
from autods.report import live
from autods.report.live import TrialProgress
from autods.report.rank_logs import RankLogs
from autods.system.processes import find_log_parts, split_log
from tests.support.reports import fit, record

TRIAL = record(3, "zero2", fit()).trial


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The logs of trial 3, which runs."""
    (tmp_path / "003-zero2").mkdir()
    return tmp_path


def write(folder: Path, rank: int, data: bytes) -> None:
    with (folder / "003-zero2" / f"rank{rank}.log").open("ab") as file:
        file.write(data)


def test_each_line_is_passed_on_once_with_its_rank(folder: Path) -> None:
    logs = RankLogs(folder)
    write(folder, 1, b"one\n")
    write(folder, 0, b"first\n\nsec")
    assert logs.read_new_lines(3, TRIAL) == ["rank 0: first", "rank 1: one"]
    write(folder, 0, b"ond\nthird")
    assert logs.read_new_lines(3, TRIAL) == ["rank 0: second"]
    assert logs.read_new_lines(3, TRIAL, ended=True) == ["rank 0: third"]
    assert logs.read_new_lines(3, TRIAL, ended=True) == []


def test_moves_of_the_cursor_and_colours_are_left_out(folder: Path) -> None:
    write(folder, 0, b"100%|##| 16/16\x1b[A\n   \x1b[A\r\x1b[A{'loss': 4.7}\n\x1b[31mred\x1b[0m\n\x1b]0;title\x07\n")
    lines = RankLogs(folder).read_new_lines(3, TRIAL)
    assert lines == [f"rank 0: {text}" for text in ("100%|##| 16/16", "{'loss': 4.7}", "red")]


def test_logs_of_other_trials_are_left_alone(folder: Path) -> None:
    (folder / "004-zero2").mkdir()
    (folder / "004-zero2" / "rank0.log").write_text("another\n")
    write(folder, 0, b"mine\n")
    assert RankLogs(folder).read_new_lines(3, TRIAL) == ["rank 0: mine"]


def test_progress_bars_and_bytes_that_are_no_text_become_lines(folder: Path) -> None:
    write(folder, 0, b"10%\r20%\r\n\xff\xfe\n" + b"x" * 5000 + b"\n")
    ten, twenty, bytes_, long = RankLogs(folder).read_new_lines(3, TRIAL)
    assert (ten, twenty, bytes_) == ("rank 0: 10%", "rank 0: 20%", "rank 0: \ufffd\ufffd")
    assert len(long) == len("rank 0: ") + 2000


def test_stacks_that_the_monitor_asked_for_are_left_out(folder: Path) -> None:
    logs = RankLogs(folder)
    write(folder, 0, b'loss 1.2 Stack (most recent call first):\n  File "/home/me/train.py", line 3 in evaluate\n')
    assert logs.read_new_lines(3, TRIAL) == ["rank 0: loss 1.2"]
    write(folder, 0, b'  File "<frozen runpy>", line 88 in _run_code\n  ...\n  File the report\n')
    assert logs.read_new_lines(3, TRIAL) == ["rank 0:   File the report"]


def test_the_stack_of_a_crash_is_passed_on(folder: Path) -> None:
    stack = ["Current thread 0x00007f (most recent call first):", '  File "/home/me/train.py", line 3 in evaluate']
    write(folder, 0, "".join(f"{line}\n" for line in stack).encode())
    assert RankLogs(folder).read_new_lines(3, TRIAL) == [f"rank 0: {line}" for line in stack]


def test_no_line_is_lost_where_a_log_is_split(folder: Path) -> None:
    logs, count = RankLogs(folder), 0
    lines: list[str] = []
    for _ in range(30):
        write(folder, 0, b"".join(b"step %d\n" % number for number in range(count, count + 7)))
        count += 7
        split_log(folder / "003-zero2" / "rank0.log", last_parts=2, most=400, end=200)
        lines += logs.read_new_lines(3, TRIAL)
    assert find_log_parts(folder / "003-zero2" / "rank0.log")
    assert lines == [f"rank 0: step {number}" for number in range(count)]


def test_a_log_that_is_gone_is_no_error(folder: Path) -> None:
    logs = RankLogs(folder)
    write(folder, 0, b"line\n")
    logs.read_new_lines(3, TRIAL)
    (folder / "003-zero2" / "rank0.log").unlink()
    assert logs.read_new_lines(3, TRIAL, ended=True) == []


def test_a_verbose_fit_prints_what_ranks_print(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_LOGS_EVERY_S", 0.02)
    console = Console(file=io.StringIO(), width=100)
    assert isinstance(console.file, io.StringIO)
    with TrialProgress(console, logs=folder) as progress:
        progress(TrialStarted(id=3, trial=TRIAL))
        write(folder, 0, b"\x1b]0;titleloss 1.0\n")
        until = time.monotonic() + 9
        while "loss" not in console.file.getvalue():
            assert time.monotonic() < until
            time.sleep(0.02)
        write(folder, 0, b"loss 0.5")
        progress(TrialFinished(record=record(3, "zero2", fit())))
    lines = console.file.getvalue().splitlines()
    assert lines[:2] == ["rank 0: \\x1b]0;titleloss 1.0", "rank 0: loss 0.5"]
    assert lines[2].startswith("trial 3: zero2")
