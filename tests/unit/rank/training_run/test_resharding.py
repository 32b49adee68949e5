from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from autods.rank.training_run.resharding import FP32, SavedParameter, SavedStates, write_states

NAMES = {
    "ZeRO": ("single_partition_of_fp32_groups", "bit16_groups"),
    "BF16_Optimizer": ("fp32_groups_flat_partition", "bf16_groups"),  # where gradients accumulate in fp32
}


@pytest.mark.parametrize("kind", NAMES)
def test_states_go_into_either_optimizer_of_stage_1(kind):
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    part = SimpleNamespace(start=0, numel=4)
    weight._hp_mapping = SimpleNamespace(hp_fragment_address=part, lp_fragment_address=part)
    flat = torch.zeros(4)
    base, (flats, groups) = torch.optim.AdamW([flat]), NAMES[kind]
    optimizer = SimpleNamespace(optimizer=base, update_lp_params=lambda: None, **{flats: [flat], groups: [[weight]]})
    engine = SimpleNamespace(
        zero_optimization_stage=lambda: 1, module=torch.nn.Module(), optimizer=optimizer, lr_scheduler=None
    )
    saved = SavedParameter()
    saved.append({FP32: torch.arange(4.0), "exp_avg": torch.ones(4)})
    counters = {"global_steps": 3, "global_samples": 12, "skipped_steps": 0}
    states = SavedStates(parameters={"weight": saved}, counters=counters, keys=("exp_avg",), step=3)
    write_states(engine, states, {weight: "weight"})
    assert flat.tolist() == [0, 1, 2, 3]
    assert base.state[flat]["exp_avg"].tolist() == [1, 1, 1, 1]
    assert (base.state[flat]["step"], engine.global_steps) == (3, 3)
