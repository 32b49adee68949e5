"""The jobs that a trial becomes, and what ends a fit before its first trial."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autods.config.deepspeed import get_key
from autods.config.settings import Settings
from autods.errors import EnvironmentBroken, InputError
from autods.events import Event, Note
from autods.runner.protocol import LoadFailed, RankError, Ready, ZygoteDied
from autods.runner.runner import JobFactory, check_ready, check_survey, may_need_all_ranks
from autods.schema import read_as
from autods.trial.job import describe_error
from autods.trial.ops import BUILDERS
from autods.types import Failed, Knobs, OutOfMemory, Trial
from tests.support.ends import JOB, rank_exit, report_of
from tests.support.walks import FACTS, SETTINGS

SWAP = "zero_optimization.offload_optimizer.nvme_path"
LOG = Path("/logs/zygote.log")


def jobs(settings: Settings = SETTINGS, **options: Any) -> JobFactory:
    common: dict[str, Any] = {"facts": FACTS, "loaded": SETTINGS.source, "swap_mark": "1-abc"}
    return JobFactory(settings=settings, **(common | options))


def a_trial(rung: str = "zero2", **options: Any) -> Trial:
    knobs = Knobs(micro_batch=4, accumulation=2, checkpointing=False)
    return Trial(rung=rung, knobs=knobs, purpose="walk", **options)


def test_a_trial_is_a_job_for_all_ranks_with_its_knobs() -> None:
    job = jobs().training(a_trial(), 7)
    assert (job.job, job.world_size, job.local_ranks) == ("train", 2, (0, 1))
    assert (job.micro_batch, job.accumulation, job.checkpointing) == (4, 2, False)
    assert job.folder == "out/logs/007-zero2"
    assert get_key(job.ds_config, "zero_optimization.stage") == 2
    assert get_key(job.ds_config, "train_micro_batch_size_per_gpu") == 4


def test_the_device_is_limited_where_a_budget_was_given() -> None:
    whole_card = replace(SETTINGS, device_bytes_asked=False)
    assert jobs().training(a_trial(), 1).limit_bytes == SETTINGS.device_bytes
    assert jobs().training(a_trial(limited=False), 1).limit_bytes is None
    assert jobs(whole_card).training(a_trial(), 1).limit_bytes is None


def test_a_trial_swaps_into_a_folder_of_its_driver() -> None:
    factory, trial = jobs(), a_trial("zero3-nvme")
    job = factory.training(trial, 1)
    assert job.swap == "/scratch/autods-1-abc"
    assert get_key(job.ds_config, SWAP) == job.swap
    assert get_key(factory.final_config(trial), SWAP) == "/scratch"
    assert factory.training(a_trial(), 1).swap is None


def test_a_workload_is_bound_again_where_its_arguments_differ() -> None:
    other = replace(SETTINGS, source=replace(SETTINGS.source, digest="1", seq_len=128))
    assert not jobs().training(a_trial(), 1).rebind
    assert jobs(other).training(a_trial(), 1).rebind


def test_a_survey_checks_the_ops_of_the_rungs_that_can_run() -> None:
    assert "async_io" in jobs().survey().ops
    without = jobs(replace(SETTINGS, nvme_path=None)).survey().ops
    assert "async_io" not in without
    assert "cpu_adam" in without
    script = replace(SETTINGS, source=replace(SETTINGS.source, kind="script"))
    assert jobs(script).survey().ops == tuple(BUILDERS)  # its config may need any


def test_a_survey_is_on_one_rank_until_all_are_needed() -> None:
    survey = jobs().survey()
    assert survey.world_size == 1
    everywhere = jobs().on_all_ranks(survey)
    assert (everywhere.world_size, everywhere.local_ranks, everywhere.ops) == (2, (0, 1), survey.ops)


def test_runners_side_by_side_write_different_logs() -> None:
    second = jobs(number=1)
    assert Path(second.survey().folder).name == "survey-beside1"
    assert Path(second.building("cpu_adam").folder).name == "build-cpu_adam-beside1"
    assert Path(second.training(a_trial(), 3).folder).name == "003-zero2"


def test_a_build_has_a_time_limit_of_its_own() -> None:
    job, limits = jobs().building("cpu_adam"), SETTINGS.profile.limits
    assert (job.ops, job.init_s, job.wall_s) == (("cpu_adam",), limits.build_s, limits.build_s)
    assert jobs().training(a_trial(), 1).wall_s == limits.wall_s


def caught(error: Exception) -> dict[str, Any]:
    """The error as a rank or a zygote describes it."""
    try:
        raise error
    except Exception as raised:
        return describe_error(raised, JOB.source.path)


def checked(ready: Ready | LoadFailed | ZygoteDied) -> list[Event]:
    events: list[Event] = []
    check_ready(ready, JOB, LOG, events.append)
    return events


@pytest.mark.parametrize(
    ("error", "ends", "words"),
    [
        (NameError("name 'np' is not defined"), InputError, "/model.py: .*NameError"),
        (ModuleNotFoundError("No module named 'nothing'"), EnvironmentBroken, "pip install"),
    ],
)
def test_a_module_that_cannot_be_imported_ends_the_fit(error: Exception, ends: type[Exception], words: str) -> None:
    with pytest.raises(ends, match=words):
        checked(LoadFailed(error=read_as(RankError, caught(error))))


def test_a_zygote_that_died_while_loading_names_its_log() -> None:
    with pytest.raises(EnvironmentBroken, match=r"SIGKILL[^$]*see /logs/zygote\.log"):
        checked(ZygoteDied(how="killed by SIGKILL"))


def test_ranks_that_cannot_be_forked_are_reported() -> None:
    (note,) = checked(Ready(pid=1, spawn_because="CUDA was initialised while importing"))
    assert isinstance(note, Note)
    assert "new processes" in note.text
    assert "CUDA was initialised" in note.text
    assert checked(Ready(pid=1)) == []


def test_a_survey_that_failed_names_the_log_of_its_rank() -> None:
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


def test_a_model_that_fits_into_no_memory_is_wrong_input() -> None:
    full = OutOfMemory(tier="host", rank=-1, phase="build", evidence="killed")
    with pytest.raises(InputError, match="does not fit into this machine's memory"):
        check_survey(full, JOB)


@pytest.mark.parametrize(
    ("kind", "error", "needed"),
    [
        ("script", AssertionError("world size 1 is not a multiple of 2 stages"), True),
        ("script", KeyError("loss"), False),
        ("file", AssertionError("world size 1 is not a multiple of 2 stages"), False),
    ],
)
def test_a_script_that_checks_the_world_size_needs_all_ranks(kind: Any, error: Exception, needed: bool) -> None:
    job = replace(JOB, source=replace(JOB.source, kind=kind))
    assert may_need_all_ranks([report_of(rank_exit(0, error=caught(error)))], job) is needed
