"""Which modules of a model recompute their activations, and how that is switched."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from autods.rank.model_facts import list_recomputing, recomputes, set_checkpointing


class Blocks(nn.Module):
    """As transformers' models: layers with a switch, and methods of the old name."""

    supports_gradient_checkpointing = True

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.layer: Any = nn.Linear(1, 1)
        self.layer.gradient_checkpointing = False
        self.inner = inner
        self.calls: list[Any] = []

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        self.calls.append(kwargs)
        self.layer.gradient_checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        self.calls.append("off")
        self.layer.gradient_checkpointing = False


class Unable(Blocks):
    supports_gradient_checkpointing = False


def test_the_outermost_module_with_the_method_is_switched() -> None:
    blocks = Blocks(inner=Blocks())
    wrapped = nn.Sequential(nn.Linear(1, 1), blocks)
    assert list_recomputing(wrapped) == [blocks]
    set_checkpointing(wrapped, on=True)
    assert recomputes(wrapped)
    assert (blocks.calls, blocks.inner.calls) == ([{}], [])


@pytest.mark.parametrize("model", [nn.Linear(1, 1), Unable()])
def test_a_model_that_cannot_recompute_is_left_alone(model: nn.Module) -> None:
    assert list_recomputing(model) == []
    set_checkpointing(model, on=True)
    assert not recomputes(model)


def test_a_model_that_recomputes_goes_on_in_its_own_way() -> None:
    blocks = Blocks()
    blocks.gradient_checkpointing_enable(use_reentrant=True)
    set_checkpointing(blocks, on=True)
    assert blocks.calls == [{"use_reentrant": True}]


def test_a_forward_without_gradients_recomputes_nothing() -> None:
    """A generation in training mode would lose its cache."""
    blocks = Blocks()
    set_checkpointing(nn.Sequential(blocks), on=True)
    blocks.forward = lambda x: blocks.layer.gradient_checkpointing
    with torch.no_grad():
        assert blocks(torch.ones(1)) is False
    assert blocks(torch.ones(1)) is True


def test_a_model_that_recomputes_can_be_saved_whole() -> None:
    blocks = Blocks()
    set_checkpointing(blocks, on=True)
    assert recomputes(pickle.loads(pickle.dumps(blocks)))


def test_what_a_model_has_turned_on_is_turned_off() -> None:
    blocks = Blocks()
    blocks.gradient_checkpointing_enable()
    set_checkpointing(blocks, on=False)
    assert not recomputes(blocks)
