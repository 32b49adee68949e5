"""The journal of a run: which options may change between two calls."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from autods.errors import InputError, make_write_error
from autods.journal import Journal
from autods.supervisor.run_journal import Attempt, RunConfig, RunJournal
from tests.support.journaled import TRIAL

BEGAN = {"first_step": 0, "began": 0.0}


def test_options_may_change_until_an_attempt_has_started(tmp_path: Path) -> None:
    for arguments in ("--lr 1e-4x", "--lr 1e-4"):  # the script refused the first, before any attempt
        journal = RunJournal(tmp_path)
        journal.open({"arguments": arguments})
        journal.note_workload("a")
    config = RunConfig(rung="ddp", knobs=TRIAL.knobs, world_size=2)
    journal.start_attempt(Attempt(number=1, config=config, **BEGAN))
    with pytest.raises(InputError, match=r"other options \(arguments: --lr 1e-4 → --lr 1e-5\)"):
        RunJournal(tmp_path).open({"arguments": "--lr 1e-5"})


def test_an_older_journal_may_name_fewer_options(tmp_path: Path) -> None:
    journal = RunJournal(tmp_path)
    journal.open({"--seed": 0})
    journal.start_attempt(Attempt(number=1, config=RunConfig(rung="ddp", knobs=TRIAL.knobs, world_size=2), **BEGAN))
    assert RunJournal(tmp_path).open({"--seed": 0, "--seq-len": "32"}).attempts


@pytest.mark.parametrize("line", ["no JSON", '{"kind": "unknown"}'])
def test_damage_is_mended_at_the_cost_of_checkpoints(tmp_path: Path, line: str) -> None:
    RunJournal(tmp_path).open({})
    path = tmp_path / "run.jsonl"
    path.write_text(f"{path.read_text()}{line}\n")
    with pytest.raises(InputError) as error:
        RunJournal(tmp_path).open({})
    assert error.value.place == f"{path}:2"
    assert error.value.hint == "start over with --fresh, which forgets its checkpoints, too"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ESTALE, errno.EIO])
def test_a_note_that_a_disk_refuses_is_written_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    journal = RunJournal(tmp_path)
    journal.open({})

    def refuse(self: Journal, row: object) -> None:
        raise make_write_error(self.path, OSError(number, os.strerror(number)))

    with monkeypatch.context() as broken:
        broken.setattr(Journal, "append", refuse)
        journal.note_checkpoint(10)
    journal.note_checkpoint(20)
    assert RunJournal(tmp_path).open({}).saved_steps == [10, 20]
