"""A folder without a report, or with something else in its place, is named for what it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autods.errors import InputError
from autods.report.serialize import PROBE, REPORT, RUN, read, read_probe, read_run

READERS = {REPORT: read, PROBE: read_probe, RUN: read_run}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("text", ["[]", "[1]", "null", "3", '"text"', "{}"])
def test_json_that_is_no_report_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match="is not the report of a ") as refused:
        READERS[name](tmp_path)
    assert " --fresh` starts over" in str(refused.value)


@pytest.mark.parametrize("journal", ["journal.jsonl", "run.jsonl"])
def test_what_has_not_ended_says_so(tmp_path: Path, journal: str) -> None:
    (tmp_path / journal).touch()
    with pytest.raises(InputError, match="has not ended: it runs, or was interrupted"):
        read(tmp_path)


def test_a_folder_without_a_journal_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read(tmp_path)


def test_a_folder_of_fits_names_the_newest_below_it(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "old")):
        (tmp_path / name).mkdir()
        (tmp_path / name / REPORT).write_text("{}")
        os.utime(tmp_path / name / REPORT, (1000 - age, 1000 - age))
    with pytest.raises(InputError, match=f"holds 2 of them: give {tmp_path / 'new'}, the newest"):
        read(tmp_path)
