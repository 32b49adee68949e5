"""Tokens of experts: their sum is that of all choices, whatever the router chooses."""

from __future__ import annotations

import gc

import torch

from autods.forecast.simulate.unknown_values import Choices


def test_experts_share_the_choices_of_all_tokens() -> None:
    choices, chosen = Choices(), torch.zeros(10, 2, dtype=torch.long)
    mask = torch.nn.functional.one_hot(chosen, 4)
    choices.note(mask, chosen)
    by_expert = mask.permute(2, 1, 0)
    assert [choices.take(by_expert[expert]) for expert in range(4)] == [10, 10, 0, 0]


def test_a_list_of_choices_has_a_token_for_each() -> None:
    choices, chosen = Choices(), torch.zeros(6, dtype=torch.long)
    mask = torch.nn.functional.one_hot(chosen, 3)
    choices.note(mask, chosen)
    assert [choices.take(mask[:, expert]) for expert in range(3)] == [6, 0, 0]


def test_tensors_that_are_no_mask_are_not_counted() -> None:
    choices, chosen = Choices(), torch.zeros(6, dtype=torch.long)
    choices.note(torch.nn.functional.one_hot(chosen, 3), chosen)
    gc.collect()
    assert all(choices.take(torch.ones(6)) is None for _ in range(10))
