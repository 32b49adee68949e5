"""How long a trial may be silent and take: as the profile says for a small model, longer for a large one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from autods.config.profiles import read_profile
from autods.runner.time_limits import choose_group_timeout, limit_training, silence_limits
from autods.types import Knobs, Steps, Trial
from tests.support.walks import FACTS

LIMITS = read_profile("default").limits
TRIAL = Trial(rung="zero3", knobs=Knobs(), purpose="walk", steps=Steps(warmup=1, timed=1, most_timed=1))
HUGE = replace(FACTS, parameters=70_000_000_000)
TO_CPU: Mapping[str, Any] = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
TO_NVME: Mapping[str, Any] = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}


def limits_of(
    facts: Any = HUGE, config: Mapping[str, Any] = TO_CPU, trial: Trial = TRIAL, **options: Any
) -> dict[str, Any]:
    options = {"nodes": 1, "sample_s": 0.0, "steps": trial.steps, "exam": trial.exam, **options}
    return limit_training(LIMITS, trial.knobs, facts, config, **options)


def test_a_hang_of_a_small_model_is_found_as_soon_as_the_profile_says() -> None:
    """FACTS has 32 million parameters."""
    few = limits_of(FACTS)
    for phase, seconds in silence_limits(LIMITS).items():
        assert seconds <= few["silence_s"][phase] < 1.02 * seconds
    assert LIMITS.wall_s <= few["wall_s"] < 1.01 * LIMITS.wall_s
    assert few["end_s"] < 65


def test_building_and_saving_70b_parameters_may_take_hours() -> None:
    silence_s = limits_of()["silence_s"]
    assert silence_s["build"] - LIMITS.init_s == pytest.approx(2800)  # 280 GB at 100 MB/s
    assert silence_s["save"] - LIMITS.init_s > 9800  # 980 GB


def test_an_optimizer_on_nvme_has_longer_for_a_step_than_in_memory() -> None:
    memory, nvme = (limits_of(config=config)["silence_s"] for config in (TO_CPU, TO_NVME))
    on_device = limits_of(config={})["silence_s"]
    assert nvme["step"] - LIMITS.stall_s > 7840  # 28 bytes of each parameter at 250 MB/s
    assert nvme["step"] > memory["step"] > on_device["step"]


def test_nodes_share_what_is_saved_but_each_builds_the_whole() -> None:
    alone, shared = (limits_of(nodes=nodes)["silence_s"] for nodes in (1, 8))
    assert shared["save"] < alone["save"] / 2
    assert shared["build"] == alone["build"]


@pytest.mark.parametrize(
    ("parameters", "nodes", "minutes"), [(32_000_000, 1, None), (7_000_000_000, 1, 35), (70_000_000_000, 8, 94)]
)
def test_groups_wait_for_a_load_longer_than_ten_minutes(parameters: int, nodes: int, minutes: int | None) -> None:
    facts = replace(FACTS, parameters=parameters)
    # Twice the 980 s of 98 GB saved and 56 s gathered, and twice the 2,800 s of 280 GB built.
    assert choose_group_timeout(facts, TO_CPU, nodes=nodes) == minutes


def test_the_whole_trial_has_time_for_all_its_phases() -> None:
    exam = limits_of(trial=replace(TRIAL, exam="worst_case"))
    moved = {phase: exam["silence_s"][phase] - seconds for phase, seconds in silence_limits(LIMITS).items()}
    slowest = moved["build"] + moved["init"] + moved["save"] + moved["load"] + 2 * moved["step"]
    assert exam["wall_s"] > LIMITS.wall_s + slowest
    assert limits_of()["wall_s"] < exam["wall_s"]


def test_killed_ranks_have_time_to_unpin_and_to_remove_swap_files() -> None:
    assert limits_of()["end_s"] > 60 + 16 * 70  # 1.1 TB of states at 1 GB/s
    assert limits_of(config=TO_NVME)["end_s"] > limits_of()["end_s"]


def test_a_pipeline_may_be_silent_for_all_micro_batches_of_a_step() -> None:
    accumulating = replace(TRIAL, knobs=Knobs(micro_batch=2, accumulation=8))
    plain, pipeline = (
        limits_of(replace(FACTS, pipeline_stages=stages), {}, accumulating, sample_s=1.0)["silence_s"]["forward"]
        for stages in (0, 2)
    )
    assert pipeline - plain == pytest.approx(10 * 2 * 7)


def test_a_compile_has_the_time_of_a_build() -> None:
    assert silence_limits(LIMITS)["compile"] == LIMITS.build_s
