"""What ranks are told of a trial, and the DeepSpeed config that comes with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from autods.config.deepspeed import get_key
from autods.requests import Settings
from autods.runner.runner import Jobs
from autods.trial.ops import BUILDERS
from autods.types import Knobs, Trial
from tests.support.walks import FACTS, SETTINGS

SWAP = "zero_optimization.offload_optimizer.nvme_path"


def jobs(settings: Settings = SETTINGS, **said: Any) -> Jobs:
    return Jobs(**{"settings": settings, "facts": FACTS, "loaded": SETTINGS.source, "mark": "1-abc", **said})


def trial(rung: str = "zero2", **said: Any) -> Trial:
    knobs = Knobs(micro_batch=4, accumulation=2, checkpointing=False)
    return Trial(rung=rung, knobs=knobs, purpose="walk", **said)


def test_a_trial_is_for_all_ranks_with_its_knobs_and_a_folder_of_its_own() -> None:
    job = jobs().training(trial(), 7)
    assert (job.job, job.world_size, job.local_ranks) == ("train", 2, (0, 1))
    assert (job.micro_batch, job.accumulation, job.checkpointing) == (4, 2, False)
    assert job.folder == "out/logs/007-zero2"
    assert get_key(job.ds_config, "zero_optimization.stage") == 2
    assert get_key(job.ds_config, "train_micro_batch_size_per_gpu") == 4


def test_the_device_is_limited_where_a_budget_was_asked_for_and_the_trial_has_one() -> None:
    whole_card = replace(SETTINGS, device_bytes_asked=False)
    assert jobs().training(trial(), 1).limit_bytes == SETTINGS.device_bytes
    assert jobs().training(trial(limited=False), 1).limit_bytes is None
    assert jobs(whole_card).training(trial(), 1).limit_bytes is None


def test_a_trial_swaps_into_a_folder_of_its_driver_and_the_users_config_into_the_users() -> None:
    told, asked = jobs(), trial("zero3-nvme")
    job = told.training(asked, 1)
    assert job.swap == "/scratch/autods-1-abc"
    assert get_key(job.ds_config, SWAP) == job.swap
    assert get_key(told.final_config(asked), SWAP) == "/scratch"
    assert told.training(trial(), 1).swap is None


def test_ranks_load_a_workload_anew_only_where_its_arguments_are_others() -> None:
    other = replace(SETTINGS, source=replace(SETTINGS.source, digest="1", seq_len=128))
    assert not jobs().training(trial(), 1).rebind
    assert jobs(other).training(trial(), 1).rebind


def test_a_look_asks_for_the_ops_of_the_ladder_and_not_for_those_of_a_rung_that_has_no_nvme() -> None:
    assert "async_io" in jobs().survey().ops
    without = jobs(replace(SETTINGS, nvme_path=None)).survey().ops
    assert "async_io" not in without
    assert "cpu_adam" in without
    script = replace(SETTINGS, source=replace(SETTINGS.source, kind="script"))
    assert jobs(script).survey().ops == tuple(BUILDERS)  # its config may ask for any


def test_a_look_is_on_one_rank_until_all_are_wanted() -> None:
    look = jobs().survey()
    assert look.world_size == 1
    everywhere = jobs().on_all_ranks(look)
    assert (everywhere.world_size, everywhere.local_ranks, everywhere.ops) == (2, (0, 1), look.ops)


def test_runners_side_by_side_write_logs_of_their_own_and_trials_have_their_number() -> None:
    beside = jobs(own="-beside1")
    assert Path(beside.survey().folder).name == "survey-beside1"
    assert Path(beside.building("cpu_adam").folder).name == "build-cpu_adam-beside1"
    assert Path(beside.training(trial(), 3).folder).name == "003-zero2"


def test_a_build_may_take_its_own_time() -> None:
    job, limits = jobs().building("cpu_adam"), SETTINGS.profile.limits
    assert (job.ops, job.init_s, job.wall_s) == (("cpu_adam",), limits.build_s, limits.build_s)
    assert jobs().training(trial(), 1).wall_s == limits.wall_s
