"""How the user's own fault is said: where, what, how to fix it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autods.diagnosis import Evidence, explain_failure, input_error
from autods.types import Failed, OutOfMemory, Phase

LOG = Path("/out/logs/rank0.log")


def failed(**said: Any) -> Failed:
    outcome = explain_failure([ended(**said)])
    assert isinstance(outcome, Failed)
    return outcome


def ended(phase: Phase = "forward", **said: Any) -> Evidence:
    return Evidence(**{"rank": 0, "phase": phase, "step": 0, "at_s": 1.0, "device": "cpu", "exit": 1, **said})


def test_the_line_of_the_workload_stands_in_the_place() -> None:
    failure = failed(types=("ValueError",), message="no data", user_frame="/x/model.py:12")
    error = input_error(failure, "/x/model.py", LOG)
    assert (error.where, error.what) == ("/x/model.py:12", "ValueError: no data")
    assert str(LOG) in str(error.hint)


def test_a_line_of_a_module_that_the_workload_imports_stands_there_alone() -> None:
    failure = failed(types=("ValueError",), message="no data", user_frame="/x/data/read.py:7")
    assert input_error(failure, "/x/model.py", LOG).where == "/x/data/read.py:7"


def test_without_a_line_the_file_is_the_place() -> None:
    error = input_error(failed(contract="the loss is nan", hint="check it"), "/x/model.py", LOG)
    assert (error.where, error.what) == ("/x/model.py", "the loss is nan")
    assert str(error.hint).startswith("check it (rank 0, forward")


def test_leaving_the_process_is_said_with_its_line() -> None:
    failure = failed(types=("SystemExit",), message="7", user_frame="/x/model.py:3")
    assert failure.evidence == "/x/model.py:3: sys.exit(7) was called"


@pytest.mark.parametrize("phase", ["init", "step"])
def test_what_deepspeed_raises_outside_the_users_code_is_the_configs_fault(phase: Phase) -> None:
    failure = failed(phase=phase, types=("TypeError",), message="'>' not supported")
    assert failure.action == "fix_config"
    assert input_error(failure, "/x/model.py", LOG).where == "DeepSpeed config"


def test_pydantics_message_is_cut_to_the_key_and_its_fault() -> None:
    message = (
        "1 validation error for DeepSpeedZeroConfig\nstage_3\n"
        "  Extra inputs are not permitted [type=extra_forbidden, input_value=1, input_type=int]\n    For further …"
    )
    failure = failed(phase="init", types=("ValidationError", "ValueError"), message=message)
    assert failure.evidence == "stage_3: Extra inputs are not permitted"


def test_a_rendezvous_that_fails_is_not_the_workloads_fault() -> None:
    assert failed(phase="rendezvous", types=("RuntimeError",), message="wrong store").action == "retry"


def test_a_thread_that_has_no_room_for_its_stack_is_the_budgets_end() -> None:
    end = ended(phase="rendezvous", types=("RuntimeError",), message="Resource temporarily unavailable")
    outcome = explain_failure([end])
    assert isinstance(outcome, OutOfMemory)
    assert outcome.tier == "device"


def test_a_result_that_cannot_be_written_is_the_disks_fault() -> None:
    assert failed(exit=98, phase="done").action == "fix_environment"
