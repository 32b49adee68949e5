"""A run waits where its disk is full, and goes on once there is room."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from autods.errors import DiskFull, make_write_error
from autods.journal import Journal
from autods.supervisor import room as room_module
from autods.supervisor.room import Room
from autods.supervisor.run_journal import Decision, RunConfig, RunJournal
from tests.support.journaled import TRIAL

FULL = make_write_error(Path("out/run.jsonl"), OSError(errno.ENOSPC, "No space left on device"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "_LOOK_AGAIN_S", 0.01)


class FullDisk:
    """Raises for the first `refusals` calls of `write`."""

    def __init__(self, refusals: int) -> None:
        self.refusals, self.writes = refusals, 0

    def write(self) -> None:
        if self.refusals > 0:
            self.refusals -= 1
            raise FULL
        self.writes += 1


def make_room(notes: list[object], *, wait_for_s: float = 60.0, is_stopping: bool = False) -> Room:
    return Room(listen=notes.append, is_stopping=lambda: is_stopping, wait_for_s=wait_for_s)


def test_a_write_waits_for_room_and_is_done_once() -> None:
    notes: list[object] = []
    disk = FullDisk(3)
    make_room(notes).await_for(disk.write)
    assert (disk.refusals, disk.writes) == (0, 1)
    first, last = map(str, notes)
    assert first.startswith(
        "warning: out/run.jsonl: cannot be written: No space left on device; the run waits for room"
    )
    assert last.startswith("there is room on the disk again after")


def test_a_write_that_has_room_says_nothing() -> None:
    notes: list[object] = []
    make_room(notes).await_for(FullDisk(0).write)
    assert notes == []


@pytest.mark.parametrize(("wait_for_s", "is_stopping"), [(0.0, False), (60.0, True)])
def test_waiting_ends_with_its_time_and_on_request(wait_for_s: float, is_stopping: bool) -> None:
    with pytest.raises(DiskFull, match="the same command goes on"):
        make_room([], wait_for_s=wait_for_s, is_stopping=is_stopping).await_for(FullDisk(9).write)


def test_a_decision_waits_for_room_and_a_warning_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = RunJournal(tmp_path)
    journal.open({})
    disk, append = FullDisk(3), Journal.append
    monkeypatch.setattr(Journal, "append", lambda self, row: (disk.write(), append(self, row)))
    journal.await_room = make_room([]).await_for
    journal.warn("slow")  # refused once, and kept
    config = RunConfig(rung="ddp", knobs=TRIAL.knobs, world_size=2)
    journal.decide(Decision(config=config, changed="the config of the fit"))
    again = RunJournal(tmp_path).open({})
    assert again.warnings == ["slow"]
    assert [each.config for each in again.decisions] == [config]
