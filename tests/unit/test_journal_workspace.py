"""The folder of a fit: held by one fit at a time, and nothing in it that somebody else wrote is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from autods.errors import InputError
from autods.journal import JOURNAL, Journal, workspace

USERS = ["ds_config.json", "report.json", "accelerate.yaml", "logs/train.log", "journal.jsonl", "study.jsonl"]


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("name", USERS)
def test_what_no_fit_wrote_is_never_written_over(tmp_path: Path, name: str, fresh: bool) -> None:
    (tmp_path / ".lock").touch()  # of another program
    own = tmp_path / name
    own.parent.mkdir(exist_ok=True)
    own.write_text("mine")
    with pytest.raises(InputError, match=f"holds {name} and no journal of a fit"), workspace(tmp_path, fresh=fresh):
        pass
    assert own.read_text() == "mine"


def test_a_folder_with_other_files_is_used(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("")
    with workspace(tmp_path, fresh=True) as out:
        assert out == tmp_path
    assert (tmp_path / "model.py").exists()


def test_the_traceback_of_a_fit_that_failed_early_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "internal-error.txt").write_text("")
    with workspace(tmp_path, fresh=False):
        pass


def test_fresh_removes_all_that_an_earlier_fit_left(tmp_path: Path) -> None:
    left = ["report.json", "ds_config_hf.json", "ds_config_lightning.json", "accelerate.yaml", "study.jsonl"]
    Journal(tmp_path / JOURNAL).open(fingerprint="")
    (tmp_path / "logs").mkdir()
    for name in (*left, "logs/rank0.log"):
        (tmp_path / name).write_text("")
    with workspace(tmp_path, fresh=True):
        assert [path.name for path in tmp_path.iterdir()] == [".autods.lock"]


def test_two_fits_in_one_folder_are_refused(tmp_path: Path) -> None:
    with (
        workspace(tmp_path, fresh=False),
        pytest.raises(InputError, match="another fit is running"),
        workspace(tmp_path, fresh=False),
    ):
        pass


def test_a_fit_killed_before_its_journal_starts_again(tmp_path: Path) -> None:
    with workspace(tmp_path, fresh=False):
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "zygote.log").touch()
    with workspace(tmp_path, fresh=False) as out:
        assert out == tmp_path
