"""Whether a model can be built for several ranks."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from autods.rank import shared_build
from autods.runner.environment import rank_environment
from autods.runner.rank_fork import may_share
from autods.types import WorkloadSource
from tests.support.ends import JOB

MODEL = WorkloadSource(kind="file", path="/model.py", name="model", digest="0")
CONFIG = replace(MODEL, kind="hf_config", task="causal-lm")


def test_every_variable_of_a_rank_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in shared_build.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    set_for_ranks = rank_environment(JOB, 0, 29500).keys() - os.environ.keys()
    assert {
        name for name in set_for_ranks if not name.startswith(("GLOO", "OMP", "MKL"))
    } == shared_build.RANK_VARIABLES


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
