from __future__ import annotations

from types import SimpleNamespace

import pytest

from autods.rank.training_run.states import describe_layout


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
