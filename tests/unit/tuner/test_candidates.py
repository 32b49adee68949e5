"""The rungs that a pipeline or a model with experts allows, in a fit and in a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autods.config.deepspeed import count_replicas
from autods.config.settings import apply_survey
from autods.errors import InputError
from autods.forecast.simulation_cache import why_not_forecast
from autods.report.answers.plan_advice import list_suggestions
from autods.tuner.candidates import (
    Candidate,
    idle_stages_warning,
    list_candidates,
    with_open_keys,
)
from autods.types import ModelFacts
from tests.support.planned import FACTS as LARGE
from tests.support.planned import Planned, question
from tests.support.walks import FACTS, SETTINGS

PIPELINE = replace(FACTS, pipeline_stages=2, replica_ranks=2)
EXPERTS = replace(FACTS, experts=8)
HPZ = "zero_optimization.zero_hpz_partition_size"


def skips(facts: ModelFacts, gpus: int) -> dict[str, str | None]:
    return {one.rung.name: one.skip for one in list_candidates(replace(SETTINGS, gpus=gpus), facts, {})}


def first(facts: ModelFacts, gpus: int, global_batch: int | None = None) -> Candidate:
    return list_candidates(replace(SETTINGS, gpus=gpus, global_batch=global_batch), facts, {})[0]


def test_a_pipeline_leaves_the_rungs_that_keep_gradients_whole() -> None:
    result = skips(PIPELINE, gpus=4)
    assert {name for name, reason in result.items() if reason is None} == {"ddp", "zero1"}
    assert "pipeline with ZeRO-2: DeepSpeed refuses it" in str(result["zero2-offload"])
    assert "pipeline with ZeRO-3: DeepSpeed refuses it" in str(result["zero3"])


def test_one_replica_of_a_pipeline_has_no_sharding_to_gain() -> None:
    assert skips(PIPELINE, gpus=2)["zero1"] == "1 replica of the pipeline: no sharding to gain"


def test_experts_leave_all_rungs_but_stage_3() -> None:
    result = skips(EXPERTS, gpus=2)
    assert {name for name, reason in result.items() if reason is None} == {"ddp", "zero1", "zero2", "zero2-offload"}
    assert "experts with ZeRO-3" in str(result["zero3"])


def test_a_model_of_plain_layers_keeps_every_rung() -> None:
    assert set(skips(FACTS, gpus=2).values()) == {None}


def test_a_global_batch_is_split_over_replicas_and_not_over_ranks() -> None:
    assert count_replicas({}, 4, PIPELINE) == 2
    assert first(PIPELINE, gpus=4, global_batch=4).knobs.accumulation == 2
    assert first(FACTS, gpus=4, global_batch=4).knobs.accumulation == 1


def test_ranks_that_no_pipeline_fits_into_are_the_user_s_to_change() -> None:
    apply_survey(replace(SETTINGS, gpus=4), PIPELINE)
    with pytest.raises(InputError, match="takes 2 ranks, and 3 is no multiple of that") as refused:
        apply_survey(replace(SETTINGS, gpus=3), PIPELINE)
    assert "--gpus 2" in str(refused.value)


def test_a_plan_says_of_each_rung_that_it_is_refused_or_not_forecast() -> None:
    facts = replace(LARGE, pipeline_stages=2, replica_ranks=2)
    planned = Planned(question(largest=False), facts=facts)
    said = {rung.rung: rung.reason for rung in planned.forecast.sites[0].rungs}
    assert set(planned.verdicts().values()) == {"not_applicable"}
    assert "DeepSpeed refuses" in said["zero2"]
    assert said["ddp"] == why_not_forecast(facts)
    assert not planned.simulator.measured
    assert planned.forecast.status == "not_forecast"
    assert planned.forecast.sites[0].to_try == ("ddp", "zero1")
    assert list(list_suggestions(planned.forecast, planned.forecast.sites[0])) == [
        "ddp and zero1 may fit: autods fit tries them"
    ]


def test_what_experts_fix_is_not_tuned() -> None:
    key = "zero_optimization.contiguous_gradients"
    zero2 = next(rung for rung in SETTINGS.ladder if rung.name == "zero2")
    assert key in with_open_keys(zero2, SETTINGS.site, FACTS).tune
    assert key not in with_open_keys(zero2, SETTINGS.site, EXPERTS).tune
    assert "zero_optimization.reduce_bucket_size" in with_open_keys(zero2, SETTINGS.site, EXPERTS).tune


def test_from_two_nodes_on_zero3_tries_a_copy_in_each_node() -> None:
    key, (zero3, *leaner) = HPZ, [rung for rung in SETTINGS.ladder if rung.stage == 3]
    site = replace(SETTINGS, gpus=16, nodes=2).site
    assert with_open_keys(zero3, site, FACTS).tune[key].choices == (1, 8)
    assert key not in with_open_keys(zero3, replace(SETTINGS, gpus=8).site, FACTS).tune
    assert not [rung.name for rung in leaner if key in rung.tune]  # they offload


def test_a_pipeline_without_global_batch_gets_a_warning() -> None:
    assert "2 stages then wait" in str(idle_stages_warning(PIPELINE, None))
    assert idle_stages_warning(PIPELINE, 8) is None
    assert idle_stages_warning(FACTS, None) is None
