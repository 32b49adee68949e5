"""A faulty model.py ends in one message with its place and a fix, as early as the fault can be seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bad_workloads import IN_A_TRIAL, IN_THE_SURVEY, ON_SIGHT
from tests.support.faults import Fault, is_one_message
from tests.support.hostile import Case, Way

FIT = "fit model.py --gpus 2 --device cpu --gpu-memory 1GiB --config quick --quiet --out out"


def faulty(bad: Fault, way: Way = "ranks") -> Case:
    line = f"autods {FIT}" if way == "shell" else FIT
    return Case(line, 2, bad.message, way, files={"model.py": bad.text}, leaves=("out",), seconds=400)


def place(folder: Path, bad: Fault) -> str:
    return f"{folder}/model.py:{bad.line}: " if bad.line else f"{folder}/model.py: "


def trials_in(out: Path) -> list[str]:
    return sorted(folder.name for folder in out.glob("logs/0*"))


@pytest.mark.parametrize("fault", ON_SIGHT)
def test_a_faulty_file_is_reported_without_running_it(meet, tmp_path, fault):
    bad = ON_SIGHT[fault]
    ending = meet(faulty(bad, "here"))
    assert is_one_message(ending.stderr, where=place(tmp_path, bad), message=bad.message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fault", IN_THE_SURVEY)
def test_a_broken_workload_is_reported_before_any_trial(meet, tmp_path, fault):
    bad = IN_THE_SURVEY[fault]
    ending = meet(faulty(bad))
    assert is_one_message(ending.stderr, where=place(tmp_path, bad), message=bad.message)
    assert trials_in(tmp_path / "out") == []


@pytest.mark.parametrize("fault", IN_A_TRIAL)
def test_a_workload_failing_in_the_first_trial_ends_the_fit(meet, tmp_path, fault):
    bad = IN_A_TRIAL[fault]
    ending = meet(faulty(bad))
    assert is_one_message(ending.stderr, where=place(tmp_path, bad), message=bad.message)
    assert trials_in(tmp_path / "out") == ["001-ddp"]
    log = Path(ending.stderr.partition("log: ")[2].strip().rstrip(")"))
    assert "Traceback (most recent call last)" in log.read_text() or "nan" in bad.message


def test_a_real_command_outlives_a_workload_that_leaves(meet):
    meet(faulty(IN_THE_SURVEY["leaving at import"], "shell"))  # the zygote imports it, and must not leave with it


def test_a_missing_file_is_named(meet, tmp_path):
    ending = meet(Case("fit gone.py --gpus 2 --device cpu", 2, "No such file"))
    assert is_one_message(ending.stderr, where=f"{tmp_path}/gone.py: ", message="No such file")


def test_an_output_folder_that_cannot_be_made_is_named(meet, tmp_path):
    case = Case(FIT.replace("--out out", "--out file/out"), 2, "cannot be written", "ranks", files={"file": ""})
    assert is_one_message(meet(case).stderr, where=f"{tmp_path}/file/out: ", message="cannot be written")
