"""From values to trials: what each axis changes, which cells are the same in effect, and what cannot be run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autods.errors import InputError
from autods.prober.grid import Cell, compose_cell_config, list_cells
from autods.types import ModelFacts, Scalar, Trial
from tests.support.probes import FACTS, ask

ZERO = "zero_optimization"


def cells(folder: Path, *vary: str, problems: Mapping[str, str] | None = None, **asked: Any) -> tuple[Cell, ...]:
    return list_cells(ask(folder, *vary, **asked), lambda conditions: (FACTS, problems or {}))


def trial_of(cell: Cell) -> Trial:
    assert cell.trial is not None, cell.refused
    return cell.trial


def test_cells_are_the_cross_product_of_the_axes(tmp_path: Path) -> None:
    found = cells(tmp_path, "rung=zero1,zero2", "micro_batch=1,2")
    assert [(cell.rung, trial_of(cell).knobs.micro_batch) for cell in found] == [
        ("zero1", 1), ("zero1", 2), ("zero2", 1), ("zero2", 2),
    ]  # fmt: skip
    assert [cell.number for cell in found] == [1, 2, 3, 4]


def test_each_kind_of_axis_reaches_the_trial(tmp_path: Path) -> None:
    (cell,) = cells(
        tmp_path, "rung=zero3-offload", "pin_memory=off", "precision=fp32", "checkpointing=off", "accumulation=4",
        f"{ZERO}.sub_group_size=1e7", "gradient_clipping=0.5", "optimizer.params.lr=1e-3", "gpus=1", "seq_len=32",
        "build_model.n_layer=4", "env.NCCL_P2P_DISABLE=1", gpus=None,
    )  # fmt: skip
    trial = trial_of(cell)
    assert (trial.knobs.checkpointing, trial.knobs.accumulation) == (False, 4)
    assert trial.conditions == {"gpus": 1, "seq_len": 32, "build_model.n_layer": 4, "env.NCCL_P2P_DISABLE": "1"}
    config = compose_cell_config(ask(tmp_path, "rung=zero3-offload"), trial, FACTS)
    assert config["bf16"]["enabled"] is config["fp16"]["enabled"] is False
    assert [config[ZERO][f"offload_{part}"]["pin_memory"] for part in ("param", "optimizer")] == [False, False]
    assert (config[ZERO]["sub_group_size"], config["gradient_clipping"]) == (10**7, 0.5)
    assert config["optimizer"]["params"]["lr"] == 1e-3
    assert config["train_batch_size"] == 4


def test_pin_memory_without_offload_is_one_cell_and_says_so(tmp_path: Path) -> None:
    found = cells(tmp_path, "rung=zero1,zero2-offload", "pin_memory=true,false")
    assert [cell.same_as for cell in found] == [None, 1, None, None]
    assert found[0].unheeded == found[1].unheeded == {"pin_memory": "nothing is offloaded"}
    assert not found[2].unheeded


@pytest.mark.parametrize(
    ("key", "rungs", "heeded"),
    [
        ("stage3_max_live_parameters", "zero2,zero3", [False, True]),
        ("reduce_scatter", "zero2,zero3", [True, True]),
        ("round_robin_gradients", "zero2,zero3", [True, False]),
        ("allgather_partitions", "zero1,zero3", [True, False]),
        ("reduce_bucket_size", "ddp,zero1,zero3", [False, True, True]),
        ("offload_optimizer.ratio", "zero3,zero3-offload", [False, True]),
        ("offload_param.max_in_cpu", "zero2-offload,zero3-offload-param", [False, True]),
    ],
)
def test_a_key_that_a_stage_does_not_obey_makes_no_second_cell(
    tmp_path: Path, key: str, rungs: str, heeded: list[bool]
) -> None:
    found = cells(tmp_path, f"rung={rungs}", f"{ZERO}.{key}=1,2")
    assert [not cell.unheeded for cell in found[::2]] == heeded
    assert [cell.same_as is None for cell in found[1::2]] == heeded


def test_aio_means_nothing_but_on_nvme(tmp_path: Path) -> None:
    found = cells(tmp_path, "rung=zero3,zero3-nvme", "aio.queue_depth=4,8", nvme_path=tmp_path)
    assert [cell.same_as for cell in found] == [None, 1, None, None]


def test_a_varied_key_wins_over_the_size_that_a_fit_would_start_with(tmp_path: Path) -> None:
    key = f"{ZERO}.reduce_bucket_size"
    found = cells(tmp_path, "rung=zero2", f"{key}=1e6,1e7")
    assert [trial_of(cell).knobs.settings[key] for cell in found] == [10**6, 10**7]


def test_as_written_leaves_buckets_to_the_base_config(tmp_path: Path) -> None:
    base = {ZERO: {"reduce_bucket_size": 1234}}
    (sized,) = cells(tmp_path, "rung=zero2", base_config=base)
    (written,) = cells(tmp_path, "rung=zero2", base_config=base, as_written=True)
    assert f"{ZERO}.allgather_bucket_size" in trial_of(sized).knobs.settings
    assert trial_of(written).knobs.settings == {}
    assert compose_cell_config(ask(tmp_path, "rung=zero2", base_config=base), trial_of(written), FACTS)[ZERO] == {
        "stage": 2, "reduce_bucket_size": 1234,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("vary", "asked", "said"),
    [
        (("rung=zero1",), {"gpus": 1}, "one rank: no sharding to gain"),
        (("rung=zero3-nvme",), {}, "no --nvme-path was given"),
        (("precision=fp16",), {"problems": {"fp16": "this device has no fp16"}}, "this device has no fp16: take bf16"),
        (("rung=zero2-offload",), {"problems": {"cpu_adam": "no compiler"}}, "cpu_adam cannot be built: no compiler"),
        (("micro_batch=3",), {"global_batch": 8}, "no multiple of 3 × 2 ranks"),
    ],
)
def test_a_cell_that_cannot_run_is_refused_with_a_reason(
    tmp_path: Path, vary: tuple[str, ...], asked: dict[str, Any], said: str
) -> None:
    (cell,) = cells(tmp_path, *vary, **asked)
    assert cell.trial is None
    assert said in str(cell.refused)


def test_a_rung_of_one_precision_is_refused_in_another(tmp_path: Path) -> None:
    found = cells(tmp_path, "rung=zero3-bf16-states", "precision=bf16,fp32")
    assert [cell.refused for cell in found] == [None, "the config trains in fp32: it needs bf16"]
    base = {"fp16": {"enabled": True}}
    found = cells(tmp_path, "rung=zero3-bf16-states", "precision=bf16,fp16", base_config=base)
    assert [cell.refused for cell in found] == [None, "the config trains in fp16: it needs bf16"]


def test_fp16_in_the_base_config_is_refused_where_the_device_has_none(tmp_path: Path) -> None:
    base = {"fp16": {"enabled": True}}
    (refused,) = cells(tmp_path, base_config=base, problems={"fp16": "this device has no fp16"})
    assert "no fp16" in str(refused.refused)
    (cell,) = cells(tmp_path, base_config=base)
    assert cell.refused is None


def test_checkpointing_that_the_model_cannot_do_is_refused(tmp_path: Path) -> None:
    unable = replace(FACTS, checkpointing=False)
    found = list_cells(ask(tmp_path, "checkpointing=on,off"), lambda conditions: (unable, {}))
    assert [cell.refused for cell in found] == ["the model has no gradient_checkpointing_enable()", None]


def test_accumulation_keeps_the_global_batch_for_any_ranks(tmp_path: Path) -> None:
    found = cells(tmp_path, "micro_batch=1,4", "gpus=1,2", gpus=None, global_batch=8)
    assert [trial_of(cell).knobs.accumulation for cell in found] == [8, 4, 2, 1]


def test_the_base_configs_batch_is_the_default(tmp_path: Path) -> None:
    base = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}

    def batches(*vary: str, **asked: Any) -> list[tuple[int, int]]:
        knobs = [trial_of(cell).knobs for cell in cells(tmp_path, *vary, base_config=base, **asked)]
        return [(each.micro_batch, each.accumulation) for each in knobs]

    assert batches() == [(2, 3)]
    assert batches("micro_batch=1,3") == [(1, 6), (3, 2)]  # it implies a global batch
    assert batches("gpus=1,2", gpus=None) == [(2, 3), (2, 3)]
    assert batches("accumulation=1,4") == [(2, 1), (2, 4)]


def test_a_workload_that_one_value_breaks_is_refused_there_alone(tmp_path: Path) -> None:
    def survey(conditions: Mapping[str, Scalar]) -> tuple[ModelFacts, Mapping[str, str]]:
        if conditions["build_model.n_layer"] == 0:
            raise InputError("ValueError: no layers", place="model.py:3")
        return FACTS, {}

    found = list_cells(ask(tmp_path, "build_model.n_layer=0,1"), survey)
    assert "model.py:3: ValueError: no layers" in str(found[0].refused)
    assert found[1].trial is not None
    with pytest.raises(InputError, match="no layers"):
        list_cells(ask(tmp_path, "build_model.n_layer=0"), survey)
