"""What a parity trial of a script notes: the samples, the weights it begins with, and losses of whole steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from autods.trial.distributed import Ranks
from autods.trial.loss_parity import Incomparable
from autods.trial.script.exam import Parity

ALONE = Ranks(rank=0, world_size=1, agree=bool, mean=float, wait=lambda: None)


def engine_of(*layers: torch.nn.Module) -> SimpleNamespace:
    return SimpleNamespace(module=torch.nn.Sequential(*layers), basic_optimizer=None)


def marks(*batches: object, draws: bool = False) -> str | None:
    parity = Parity(ALONE)
    for batch in batches:
        parity.forward((), {"batch": batch})
        if draws:
            torch.rand(1)
        parity.forwarded()
    samples: str | None = parity.said()["samples"]
    return samples


def test_the_mark_of_the_samples_tells_values_shapes_and_order_apart():
    ones, twos = torch.ones(4, 8), torch.full((4, 8), 2.0)
    assert marks(ones, twos) == marks(ones.clone(), twos.clone())
    others = (marks(twos, ones), marks(ones), marks(ones.reshape(8, 4), twos), marks(ones.to(torch.bfloat16), twos))
    assert len({marks(ones, twos), *others}) == 5


def test_samples_of_any_kind_of_number_have_a_mark():
    for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.float64):
        assert marks(torch.ones(3, dtype=dtype)) is not None
    assert marks({"ids": [torch.ones(2)], "name": "x"}, torch.tensor(1.0), torch.empty(0)) is not None


def test_where_the_engine_was_given_no_tensor_there_is_no_mark():
    assert marks("text") is None


def test_random_numbers_count_where_the_forward_draws_them():
    torch.manual_seed(1)
    first = marks(torch.ones(1), draws=True)
    other = marks(torch.ones(1), draws=True)
    torch.manual_seed(1)
    assert marks(torch.ones(1), draws=True) == first != other
    assert marks(torch.ones(1)) == marks(torch.ones(1))  # the state alone says nothing


def test_weights_in_parts_add_up_to_the_whole_and_padding_is_left_out():
    whole = torch.nn.Linear(5, 3, bias=False)
    parity = Parity(ALONE)
    parity.began(engine_of(whole))
    parts = []
    for rank in range(2):
        part = torch.full((8,), 1e9)
        mine = whole.weight.detach().reshape(-1)[8 * rank : 8 * rank + 8]
        part[: len(mine)] = mine
        part.ds_numel = 8
        held = torch.nn.Linear(5, 3, bias=False)
        held.weight.ds_tensor, held.weight.ds_numel = part, 15
        shared = Parity(Ranks(rank=rank, world_size=2, agree=bool, mean=lambda value: value / 2, wait=lambda: None))
        shared.began(engine_of(held))
        parts.append(shared.weights)
    assert sum(parts) == pytest.approx(parity.weights, rel=1e-12)


def test_weights_on_nvme_are_not_seen():
    model = torch.nn.Linear(2, 2)
    model.weight.ds_tensor = SimpleNamespace(final_location="OffloadDeviceEnum.nvme")
    parity = Parity(ALONE)
    parity.began(engine_of(model))
    assert parity.weights is None


def test_dropout_is_off():
    dropout = torch.nn.Dropout(0.5)
    Parity(ALONE).began(engine_of(torch.nn.Linear(2, 2), dropout))
    assert dropout.p == 0


def test_layers_of_experts_are_not_compared():
    class MoE(torch.nn.Module):
        num_experts = 4

    with pytest.raises(Incomparable, match="an expert drops tokens"):
        Parity(ALONE).began(engine_of(MoE()))


def test_the_loss_of_a_step_is_the_mean_of_its_micro_batches():
    parity = Parity(ALONE)
    for losses in ((4.0, 2.0), (1.0, None, 2.0), (None,)):
        for loss in losses:
            parity.lost(loss)
        parity.stepped()
    assert parity.losses == [3.0, 1.5]
