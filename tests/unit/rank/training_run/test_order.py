from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autods.rank.training_run.order import VARIABLE, RunOrder, find_order, read_order
from autods.workload.protocol import WorkloadError

ORDER = RunOrder(
    folder="/runs/a",
    attempt=2,
    ds_config={"zero_optimization": {"stage": 2}, "train_batch_size": 16},
    micro_batch=2,
    accumulation=4,
    global_batch=16,
    world_size=2,
    checkpointing=False,
    steps=100,
    checkpoint_every=10,
    restore="/runs/a/checkpoints/step-00000010",
)


def test_an_order_survives_its_file(tmp_path):
    order = replace(ORDER, folder=str(tmp_path))
    assert read_order(order.write()) == order


def test_an_order_file_is_replaced_whole(tmp_path):
    order = replace(ORDER, folder=str(tmp_path))
    order.write()
    path = replace(order, seed=5).write()
    assert read_order(path).seed == 5
    assert [file.name for file in path.parent.iterdir()] == ["order.json"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"unknown": 1}, "unknown"),
        ({"micro_batch": "2"}, "micro_batch"),
        ({"micro_batch": 3}, "global_batch"),
        ({"micro_batch": 0}, "micro_batch"),
        ({"checkpoint_every": 0}, "checkpoint_every"),
        ({"keep": 0}, "keep"),
        ({"world_size": 3}, "global_batch"),
    ],
)
def test_an_order_is_read_strictly(change, problem):
    data = json.loads(ORDER.to_json()) | change
    with pytest.raises(ValueError, match=problem):
        RunOrder.from_json(json.dumps(data))


def test_an_order_that_lacks_a_field_is_refused():
    data = json.loads(ORDER.to_json())
    del data["global_batch"]
    with pytest.raises(ValueError, match="global_batch"):
        RunOrder.from_json(json.dumps(data))


def test_an_order_that_cannot_be_read_names_its_file(tmp_path):
    (tmp_path / "order.json").write_text("{")
    with pytest.raises(WorkloadError, match=r"order\.json"):
        read_order(tmp_path / "order.json")
    with pytest.raises(WorkloadError, match="No such file"):
        read_order(tmp_path / "missing.json")


def test_ranks_of_one_pipeline_share_their_samples():
    order = replace(ORDER, world_size=4)
    order.check()
    assert order.replicas == 2


def test_no_order_outside_of_a_run(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert find_order() is None
