"""What ends a fit before its first trial: whose fault it is, and where to look."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autods.errors import EnvironmentBroken, InputError
from autods.events import Event, Note
from autods.runner.runner import check_ready, check_survey, may_want_ranks
from autods.trial.job import describe
from autods.types import Failed, OutOfMemory
from tests.support.ends import JOB, end

LOG = Path("/logs/zygote.log")


def raised(error: Exception) -> dict[str, Any]:
    try:
        raise error
    except Exception as caught:
        return describe(caught, JOB.source.path)


def heard(ready: dict[str, Any]) -> list[Event]:
    said: list[Event] = []
    check_ready(ready, JOB, LOG, said.append)
    return said


def test_a_module_that_raises_is_the_users_to_mend_and_a_missing_package_the_environments() -> None:
    with pytest.raises(InputError, match="NameError") as caught:
        heard({"error": raised(NameError("name 'np' is not defined"))})
    assert str(caught.value).startswith("/model.py")
    with pytest.raises(EnvironmentBroken, match="pip install"):
        heard({"error": raised(ModuleNotFoundError("No module named 'nothing'"))})


def test_a_zygote_that_died_while_it_loaded_is_the_machines_fault_and_its_log_is_named() -> None:
    with pytest.raises(EnvironmentBroken, match=r"SIGKILL[^$]*see /logs/zygote\.log"):
        heard({"died": "SIGKILL"})


def test_ranks_that_cannot_be_forked_are_said_and_end_nothing() -> None:
    (note,) = heard({"pid": 1, "unfit": "CUDA was initialised while importing"})
    assert isinstance(note, Note)
    assert "new processes" in note.text
    assert "CUDA was initialised" in note.text
    assert heard({"pid": 1}) == []


def test_a_look_that_failed_names_the_log_of_its_rank() -> None:
    check_survey(None, JOB)
    broken = Failed(
        failure="toolchain",
        rank=1,
        phase="build",
        evidence="no compiler",
        action="fix_environment",
        advice="install g++",
    )
    with pytest.raises(EnvironmentBroken, match=r"no compiler\n  install g\+\+ \(log: /logs/rank1\.log\)"):
        check_survey(broken, JOB)


def test_a_model_that_no_memory_can_hold_is_an_input_to_change() -> None:
    full = OutOfMemory(tier="host", rank=-1, phase="build", evidence="killed")
    with pytest.raises(InputError, match="does not fit into this machine's memory"):
        check_survey(full, JOB)


@pytest.mark.parametrize(
    ("kind", "error", "wants"),
    [
        ("script", AssertionError("world size 1 is not a multiple of 2 stages"), True),
        ("script", KeyError("loss"), False),
        ("file", AssertionError("world size 1 is not a multiple of 2 stages"), False),
    ],
)
def test_a_script_that_checks_the_number_of_ranks_is_looked_at_on_all(kind: Any, error: Exception, wants: bool) -> None:
    job = replace(JOB, source=replace(JOB.source, kind=kind))
    report = {"ends": [end(0, {"ok": False, "error": raised(error)}, exit=1)]}
    assert may_want_ranks([report], job) is wants
