"""A model that is built once for the ranks of all trials, and models that each rank has to build."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from autods.events import Note
from autods.runner.node_messages import NodeReport
from autods.runner.runner import RayRunner
from autods.system import processes
from autods.types import Fit, Knobs, Steps, Trial
from tests.support.fits import TORCH_ADAM, question

SMALL_BUCKETS = {f"zero_optimization.{name}_bucket_size": 1_000_000 for name in ("reduce", "allgather")}
ALONE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Why each of `tests.support.builders.CASES` has to be built in each rank."""
    folder = str(tmp_path_factory.mktemp("builds"))
    return processes.ask_module("tests.support.builders", folder, variables=ALONE, limit_s=200)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("plain", None),
        ("of_rank", "reads RANK"),
        ("of_all_variables", "reads the whole environment"),
        ("of_joined_ranks", "asks whether the ranks have joined"),
        ("with_thread", "1 threads were started while building it"),
        ("with_file", "opens or writes files"),
        ("with_shared_weights", "shared memory"),
        ("with_experts", "different parts"),
        ("that_raises", "RuntimeError: no process group"),
        ("that_ends", "ended the process"),
    ],
)
def test_a_model_that_differs_by_rank_is_not_shared(builds: dict[str, Any], model: str, reason: str | None) -> None:
    found = builds["reasons"][model]
    assert found is None if reason is None else re.search(reason, found), found


def test_a_builder_that_ends_leaves_no_process(builds: dict[str, Any]) -> None:
    assert builds["left"] == []


def a_trial(**options: Any) -> Trial:
    knobs = Knobs(checkpointing=False, settings={**TORCH_ADAM, **SMALL_BUCKETS}, accumulation=2)
    steps = Steps(warmup=1, timed=2, most_timed=2)
    return Trial(rung="zero2", knobs=knobs, purpose="walk", steps=steps, **options)


def run(runner: RayRunner, id: int, *, shares: bool, **options: Any) -> tuple[Fit, bool]:
    """The fit of a trial, and whether its ranks shared one model."""
    runner.shares_models = shares
    outcome = runner.run(a_trial(**options), id=id).outcome
    (report,) = runner.results
    assert isinstance(outcome, Fit), outcome
    assert isinstance(report, NodeReport)
    return outcome, report.built_once


def test_shared_models_train_with_the_same_losses(ray: object, tmp_path: Path) -> None:
    """And with the same peaks: shared pages count as if each rank had made them. The exam shares nothing."""
    with RayRunner(question("drawn.py", tmp_path, precision="fp32"), lambda event: None) as runner:
        runner.survey()
        shared, again, alone = (run(runner, id, shares=id < 3) for id in (1, 2, 3))
        _, examined_shares = run(runner, 4, shares=True, exam="worst_case")
        _, later = run(runner, 5, shares=True)
    assert (shared[1], again[1], alone[1], examined_shares, later) == (True, True, False, False, True)
    assert shared[0].losses == again[0].losses == alone[0].losses
    assert len(set(alone[0].losses)) == 3
    # A rank that did not count its model would lack 64 MiB: of the 343 MiB of a rank's device, and of a node's host two
    # times of some 510, where whatever malloc keeps differs by up to 60 MB between equal trials.
    for tier, spread in (("device", 1.05), ("host", 1.2)):
        peaks = [fit.memory[tier].peak_bytes for fit in (shared[0], again[0], alone[0])]
        assert max(peaks) < spread * min(peaks), (tier, peaks)


def test_the_reason_to_build_in_each_rank_is_said_once(ray: object, tmp_path: Path) -> None:
    notes: list[str] = []
    with RayRunner(
        question("of_rank.py", tmp_path), lambda event: notes.append(event.text) if isinstance(event, Note) else None
    ) as runner:
        runner.survey()
        assert [run(runner, id, shares=True)[1] for id in (1, 2)] == [False, False]
    assert [note for note in notes if "each rank builds" in note] == [
        "each rank builds the model by itself in every trial: it reads RANK while it is built"
    ]
