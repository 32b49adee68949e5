"""A run's job in a file, which the ranks of its attempt read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autods.rank.job import RUN_VARIABLE, RankJob, find_job, read_job
from autods.workload.protocol import WorkloadError
from tests.support.run_jobs import run_job


def job_in(folder: Path) -> RankJob:
    return run_job(
        folder,
        attempt=2,
        ds_config={"zero_optimization": {"stage": 2}, "train_batch_size": 16},
        micro_batch=2,
        accumulation=4,
        ranks=2,
        steps=100,
        checkpoint_every=10,
        restore="/runs/a/checkpoints/step-00000010",
    )


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    assert read_job(job.write()) == job


def test_a_job_file_is_replaced_whole(tmp_path: Path) -> None:
    job_in(tmp_path).write()
    path = replace(job_in(tmp_path), seed=5).write()
    assert read_job(path).seed == 5
    assert [file.name for file in path.parent.iterdir()] == ["job.json"]


def changed(folder: Path, **order: Any) -> str:
    data = json.loads(job_in(folder).to_json())
    return json.dumps({**data, "order": data["order"] | order})


@pytest.mark.parametrize(
    ("change", "problem"),
    [({"unknown": 1}, "unknown"), ({"attempt": "2"}, "attempt"), ({"checkpoint_every": None}, "checkpoint_every")],
)
def test_an_order_is_read_strictly(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        RankJob.from_json(changed(tmp_path, **change))


def test_an_order_that_lacks_a_field_is_refused(tmp_path: Path) -> None:
    data = json.loads(job_in(tmp_path).to_json())
    del data["order"]["folder"]
    with pytest.raises(ValueError, match="folder"):
        RankJob.from_json(json.dumps(data))


def test_a_job_that_cannot_be_read_names_its_file(tmp_path: Path) -> None:
    for text in ("{", "{}", "[]", changed(tmp_path, unknown=1)):
        (tmp_path / "job.json").write_text(text)
        with pytest.raises(WorkloadError, match=r"job\.json"):
            read_job(tmp_path / "job.json")
    with pytest.raises(WorkloadError, match="No such file"):
        read_job(tmp_path / "missing.json")


def test_ranks_of_one_pipeline_share_their_samples(tmp_path: Path) -> None:
    assert replace(job_in(tmp_path), world_size=4, replica_ranks=2).train_batch == 16


def test_no_job_outside_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN_VARIABLE, raising=False)
    assert find_job() is None
