"""Whether a model can be built for several ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autods.rank.launch_variables import RANK_VARIABLES, tell_rank
from autods.runner.rank_fork import may_share
from autods.types import WorkloadSource

MODEL = WorkloadSource(kind="file", path="/model.py", name="model", digest="0")
CONFIG = replace(MODEL, kind="hf_config", task="causal-lm")


def test_the_list_of_rank_variables_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    told = tell_rank(
        rank=0, local_rank=0, world_size=1, local_world_size=1, node_rank=0, address="127.0.0.1", port=29500
    )
    assert tuple(told) == RANK_VARIABLES


@pytest.mark.parametrize(
    ("source", "exam", "config", "may"),
    [
        (MODEL, None, {}, True),
        (CONFIG, None, {"zero_optimization": {"stage": 3}}, True),
        (CONFIG, "parity", {}, True),
        (CONFIG, "worst_case", {}, False),
        (replace(CONFIG, zero_init=True), None, {}, False),
        (replace(MODEL, kind="script"), None, {}, False),
        (CONFIG, None, {"tensor_parallel": {"autotp_size": 2}}, False),
    ],
)
def test_trials_of_one_whole_model_share_it(source: WorkloadSource, exam: Any, config: Any, may: bool) -> None:
    assert may_share(source, exam, config) is may
