from __future__ import annotations

from types import SimpleNamespace

import pytest

from autods.rank.training_run.states import describe_layout, finish_writing, read_loss_scale, set_loss_scale


def make_engine(**attributes):
    config = SimpleNamespace(_param_dict={"zero_optimization": {"stage": 1}})
    return SimpleNamespace(_config=config, world_size=4, **attributes)


@pytest.mark.parametrize(
    ("attributes", "divided"),
    [
        ({"mp_world_size": 1, "has_moe_layers": False}, False),
        ({"mp_world_size": 2, "has_moe_layers": False}, True),  # AutoTP
        ({"mp_world_size": 1, "has_moe_layers": True}, True),
        ({"mp_world_size": 1, "num_stages": 2}, True),
    ],
)
def test_ranks_that_split_a_model_hold_different_parts(attributes, divided):
    assert describe_layout(make_engine(**attributes)).divided is divided


@pytest.mark.parametrize("name", ["loss_scaler", "loss_scale_config"])  # of ZeRO's optimizers, of those of stage 0
def test_the_loss_scale_of_fp16_goes_from_any_stage_to_any(name):
    optimizer = SimpleNamespace(**{name: SimpleNamespace(cur_scale=4096.0)})
    engine = SimpleNamespace(optimizer=optimizer, fp16_enabled=lambda: True, dynamic_loss_scale=lambda: True)
    assert read_loss_scale(engine) == 4096.0
    set_loss_scale(engine, 128.0)
    assert read_loss_scale(engine) == 128.0


def test_an_optimizer_without_half_precision_has_no_loss_scale():
    assert read_loss_scale(SimpleNamespace(optimizer=SimpleNamespace())) is None


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_save_waits_for_a_writer_beside_the_training(decoupled):
    commits = []
    writer = SimpleNamespace(is_decoupled=lambda: decoupled)
    engine = SimpleNamespace(checkpoint_engine=writer, _commit_decoupled_checkpoint=lambda: commits.append("all"))
    finish_writing(engine)
    assert commits == ["all"] * decoupled
    finish_writing(SimpleNamespace())
